"""A twin from its step and its strategies: the part of `build` in which the twins do not differ."""

from functools import partial
from types import ModuleType

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shared.config import Config
from shared.model.decoding import make_decode
from shared.model.state import make_forward
from shared.model.transformer import Seams
from shared.placement.layout import Layout, layout
from shared.twin import Plan, Twin


def assemble(twin: ModuleType, config: Config, mesh: Mesh) -> Twin:
    """The step of this configuration on this mesh. Raises ValueError for sizes that do not divide.

    twin: the package, with its modules `step`, `decode` and one for each strategy. What `step.compiled` makes of a
    function of (plan, ...) and of the PartitionSpecs of inputs and outputs is the difference between the twins.
    """
    places = layout(config, mesh)
    generating = places.with_unsharded_sequences()
    plan = Plan(
        config,
        places,
        make_forward(config, seams(twin, places)),
        make_decode(config, seams(twin, generating)),
        twin.tensor_parallel.summed_loss(places),
    )
    compiled, step = partial(twin.step.compiled, places), twin.step
    state, batch, cache = places.state, places.batch, places.cache
    return Twin(
        plan,
        logits=compiled(partial(step.logits, plan), (state, batch.tokens), places.logits),
        decode=compiled(
            partial(twin.decode.decode, plan), (state, cache, batch.rows, P()), (generating.logits, cache), donate=1
        ),
        loss_and_grads=compiled(partial(step.loss_and_grads, plan), (state, batch), (P(), state.params, P())),
        train_step=compiled(partial(step.train_step, plan), (state, batch), (state, P()), donate=0),
    )


def seams(twin: ModuleType, places: Layout) -> Seams:
    """What each strategy does inside the model; the plain function, where the mesh lacks its axis."""
    return Seams(
        attention=twin.context_parallel.attention(places),
        local_heads=twin.tensor_parallel.local_heads(places),
        before_column_parallel=twin.tensor_parallel.before_column_parallel(places),
        mlp_hidden=twin.tensor_parallel.mlp_hidden(places),
        after_row_parallel=twin.tensor_parallel.after_row_parallel(places),
        residual=twin.step.residual(places),
        gather_outer_params=twin.fsdp.gather_outer_params(places),
        gather_block_params=twin.fsdp.gather_block_params(places),
        positions=twin.context_parallel.positions(places),
    )

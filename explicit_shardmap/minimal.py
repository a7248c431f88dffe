"""Data-parallel training on one page, communication written by hand: `python -m explicit_shardmap.minimal`."""

import jax
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shared.config import ModelConfig
from shared.data.batches import Dataset
from shared.data.corpus import read_corpus
from shared.model.transformer import Transformer


def loss_and_grads(graphdef, params, batch):
    def mean_loss(params):
        logits = nnx.merge(graphdef, params)(batch.tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()

    params = lax.pcast(params, "data", to="varying")  # or the gradients would be summed over the devices already
    loss, grads = jax.value_and_grad(mean_loss)(params)  # the mean over this device's rows
    return lax.pmean((loss, grads), "data")


def compiled_step(graphdef, optimizer, mesh):
    def train_step(params, opt_state, batch):
        loss, grads = loss_and_grads(graphdef, params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    replicated, rows = PartitionSpec(), PartitionSpec("data")
    return jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=(replicated, replicated, rows), out_specs=replicated))


def main():
    jax.config.update("jax_num_cpu_devices", 4)  # simulated, where there is no accelerator
    mesh = Mesh(jax.devices(), ("data",))
    dataset = Dataset(read_corpus("python-docs"), window=128, batch=16)
    graphdef, params = nnx.split(Transformer(ModelConfig(layers=2), rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    step = compiled_step(graphdef, optimizer, mesh)
    params, opt_state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, PartitionSpec()))
    for number in range(20):
        batch = jax.device_put(dataset(number), NamedSharding(mesh, PartitionSpec("data")))
        params, opt_state, loss = step(params, opt_state, batch)
        print(f"step {number + 1:2}  loss {loss:.3f}")


if __name__ == "__main__":
    main()

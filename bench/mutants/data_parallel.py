"""Planted bugs of data parallelism, one row each: the right lines, the wrong ones, and what the check has to say."""

from bench.mutants.planted import Bug, Edit, ResumeWithoutCount, StaleBatch, as_subclass

UNCHECKED = Edit("step.py", "jax.shard_map(function, ", "jax.shard_map(function, check_vma=False, ")
REDUCTION = "return lax.psum(arrays, axes)"
REDUCED = "sums, tokens = data_parallel.all_reduce(plan, (sums, tokens))"
DIVIDED = "loss, gradients = sums_to_means(sums, tokens)"
NORM = "norm = global_norm(plan, gradients)"
KEYS = "example_keys(state, batch.rows)"
FORWARD = "plan.forward(params, batch.tokens, "


def after(line: str, *added: str) -> str:
    """The line with others below it."""
    return "\n    ".join([line, *added])


BUGS = (
    Bug(
        "no pmean",
        "explicit",
        edits=(UNCHECKED, Edit("data_parallel.py", REDUCTION, "return arrays")),
        says="gradients.*: exactly what comes of reducing nothing",
    ),
    Bug(
        "psum for pmean",
        "explicit",
        edits=(
            Edit(
                "step.py",
                REDUCED,
                "sums, tokens = lax.psum(sums, 'data'), lax.pmean(tokens, 'data')",
            ),
        ),
        says="gradients: 2 times the reference .*, on 2 devices along data: .*summed where the mean is meant",
    ),
    Bug(
        "reduced twice",
        "explicit",
        edits=(
            Edit(
                "step.py",
                DIVIDED,
                after(DIVIDED, "gradients = lax.psum(lax.pcast(gradients, 'data', to='varying'), 'data')"),
            ),
        ),
        says="gradients: 2 times the reference .*, on 2 devices along data: reduced twice",
    ),
    Bug(
        "pcast forgotten",
        "explicit",
        edits=(
            Edit(
                "step.py",
                'params = jax.tree.map(partial(lax.pcast, to="varying"), state.params, plan.layout.reduce_axes)',
                "params = state.params",
            ),
        ),
        says="gradients: 2 times the reference .*, on 2 devices along data: reduced twice.*pcast",
    ),
    Bug(
        "mean of means under a mask",
        "explicit",
        edits=(
            Edit(
                "step.py",
                after(REDUCED, DIVIDED),
                after(
                    "loss, gradients = lax.pmean(sums_to_means(sums, tokens), 'data')",
                    "tokens = lax.psum(tokens, 'data')",
                ),
            ),
        ),
        says="gradients.*: exactly what comes of averaging the devices' own means",
    ),
    Bug(
        "clipping by the local norm",
        "explicit",
        edits=(
            UNCHECKED,
            Edit(
                "step.py",
                NORM,
                after(
                    "def own(params):",
                    "    logits = plan.forward(params, batch.tokens, example_keys(state, batch.rows))",
                    "    return plan.summed_loss(logits, batch.targets, batch.weights)",
                    "local = jax.grad(own)(lax.pcast(state.params, 'data', to='varying'))",
                    "norm = optax.tree.norm(local) / counted_tokens(batch.weights, plan.config.model.dtype)",
                ),
            ),
        ),
        says="parameters.*: exactly what comes of clipping by the norm of each device's own gradients",
        leaf="metrics.gradient_norm",
    ),
    Bug(
        "clipping before the reduction",
        "explicit",
        edits=(
            Edit(
                "step.py",
                after(REDUCED, DIVIDED),
                after(
                    "loss, gradients = sums_to_means(sums, lax.pmean(tokens, 'data'))",
                    "gradients = clip(gradients, global_norm(plan, gradients), plan.config.optimizer.clip)",
                    "loss, gradients = lax.pmean((loss, gradients), 'data')",
                    "tokens = lax.psum(tokens, 'data')",
                ),
            ),
        ),
        says="gradients.*: exactly what comes of clipping on each device before the reduction",
    ),
    Bug(
        "one dropout mask on every device",
        "explicit",
        edits=(Edit("step.py", KEYS, "example_keys(state, jax.numpy.arange(batch.rows.size, dtype='uint32'))"),),
        says="gradients.*: exactly what comes of giving every device the same dropout masks",
    ),
    Bug(
        "a shifted batch shard",
        "explicit",
        edits=(
            Edit(
                "step.py",
                FORWARD,
                "plan.forward(params, lax.ppermute(batch.tokens, 'data', [(1, 0), (0, 1)]), ",
            ),
        ),
        says="gradients.*: exactly what comes of a shift: each device takes the tokens of the next",
    ),
    Bug(
        "a stale batch shard",
        "explicit",
        wrap=as_subclass(StaleBatch),
        says="gradients.*: exactly what comes of a stale shard: device 1 has the rows of the step before",
    ),
    Bug(
        "a wrong learning-rate step after resuming",
        "explicit",
        wrap=as_subclass(ResumeWithoutCount),
        says="learning_rate: exactly what comes of beginning the learning-rate schedule again",
        leaf="learning_rate.step 5",
    ),
    Bug(
        "a leaf left out of the reduction",
        "explicit",
        edits=(
            UNCHECKED,
            Edit(
                "step.py",
                after(REDUCED, DIVIDED),
                after(
                    "local = sums",
                    "sums, count = data_parallel.all_reduce(plan, (local, tokens))",
                    DIVIDED.replace("tokens", "count"),
                    'gradients["output"]["kernel"] = sums_to_means(local[1]["output"]["kernel"], tokens)',
                    "tokens = count",
                ),
            ),
        ),
        leaf="gradients.output.kernel",
        says=r"gradients.output.kernel: the copies .* differ .*: a reduction over data is missing",
    ),
    Bug(
        "a reduction over the wrong axis",
        "explicit",
        edits=(UNCHECKED, Edit("data_parallel.py", REDUCTION, REDUCTION.replace("axes)", "'tensor')"))),
        devices=4,
        mesh="data=2,tensor=2",
        says="a reduction over data .*is missing",
    ),
    Bug(
        "a reduction in bfloat16",
        "explicit",
        edits=(
            Edit(
                "data_parallel.py",
                REDUCTION,
                "short = [array.astype('bfloat16') for array in arrays]\n"
                "        return [array.astype('float32') for array in lax.psum(short, axes)]",
            ),
        ),
        says="gradients: errors of about .* as rounding to bfloat16",
    ),
    Bug(
        "parameters that drift apart",
        "explicit",
        edits=(
            UNCHECKED,
            Edit(
                "step.py",
                "gradients = clip(gradients, norm, plan.config.optimizer.clip)",
                after(
                    "gradients = clip(gradients, norm, plan.config.optimizer.clip)",
                    'drift = 1 + 1e-3 * lax.axis_index("data")',
                    "gradients = jax.tree.map(lambda leaf: leaf * drift, gradients)",
                ),
            ),
        ),
        says=r"parameters\.\S+: the copies .* differ",
        leaf=r"parameters\.\S+",
    ),
    Bug(
        "masked tokens counted",
        "auto",
        edits=(Edit("step.py", "counted_tokens(batch.weights,", "counted_tokens(0 * batch.weights + 1,"),),
        devices=1,
        says="gradients.*: exactly what comes of dividing by all tokens",
    ),
    Bug(
        "each leaf clipped by itself",
        "auto",
        edits=(
            Edit(
                "step.py",
                "gradients = clip(gradients, norm, plan.config.optimizer.clip)",
                "gradients = jax.tree.map(\n"
                "        lambda leaf: clip(leaf, optax.tree.norm(leaf), plan.config.optimizer.clip), gradients\n    )",
            ),
        ),
        devices=1,
        says="parameters.*: exactly what comes of clipping each leaf by its own norm",
        leaf=r"parameters\.\S+",
    ),
    Bug(
        "the same dropout masks for each half",
        "auto",
        edits=(
            Edit(
                "step.py", "example_keys(state, batch.rows)", "example_keys(state, batch.rows % (batch.rows.size // 2))"
            ),
        ),
        says="gradients.*: exactly what comes of giving every device the same dropout masks",
    ),
)

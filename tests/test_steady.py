"""What keeps a GPU's graphs from being updated: only structure is seen here, the time is a benchmark's."""

import jax
from support import drafter, make_engine, mesh, target

from jspark.config import EngineConfig
from jspark.shapes import VerifyShape
from jspark.steady import keep_holes
from jspark.step import Sampling


def test_of_the_holes_only_the_guards_stay():
    before = {id(x) for x in jax.live_arrays()}
    guards = keep_holes(mesh())
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert sum(x.nbytes for x in new) == len(guards) < 1000


def test_layers_read_no_argument_that_changes_with_every_step():
    """All but the pools and weights are read once, at the begin: the rest reads what came of them."""
    config = EngineConfig(max_running_requests=4, page_size=16, context_length=128)
    engine = make_engine(config, target("qwen3_tiny"), drafter("dspark_qwen3_tiny_vanilla"))
    programs, called, ready = engine.programs, {}, engine.programs._ready

    def watched(key, function, donated, placement, *args):
        called[key] = function, args
        return ready(key, function, donated, placement, *args)

    programs._ready = watched
    shape = VerifyShape(4, engine.arguments.page_steps[-1], Sampling(), 32, True, None)
    programs.compile(shape)
    run, call = called[shape]
    args = engine.arguments.blank(shape)
    program = jax.make_jaxpr(run)(*call).jaxpr
    shapes = jax.tree.map(jax.numpy.shape, jax.tree.leaves(call))
    assert shapes.count(args.table.shape) == 1
    table = program.invars[shapes.index(args.table.shape)]
    readers = [e.primitive.name for e in program.eqns if table in e.invars]
    assert readers == ["max"]

"""What keeps a GPU's graphs from being updated: only structure is seen here, the time is a benchmark's."""

import jax
from support import drafter, make_engine, mesh, target

from jspark.adjust import empty_tables
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
    programs, rows = engine.programs, 4
    pools, slots, blank = programs._expected
    shape = VerifyShape(rows, engine.arguments.page_steps[-1], Sampling(), 32, True, None)
    args = blank(shape)
    programs.compile(shape)
    assert shape.propose is not None
    proposal = programs._proposals[shape.propose]
    tables = empty_tables(slots.words.shape[0] - 1, target("qwen3_tiny")[1].vocab_size)
    tables = tables.only(penalties=False, steering=False)
    run, _, _, *call = programs._verify(shape, pools, slots, args, proposal, tables, None)
    program = jax.make_jaxpr(run)(*call).jaxpr
    shapes = jax.tree.map(jax.numpy.shape, jax.tree.leaves(call))
    assert shapes.count(args.table.shape) == 1
    table = program.invars[shapes.index(args.table.shape)]
    readers = [e.primitive.name for e in program.eqns if table in e.invars]
    assert readers == ["max"]

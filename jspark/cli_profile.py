"""`jspark profile` and `jspark warmup`: the cost table, and compiled programs, before anybody waits for them.

Knows: flags and records. Does not know: how programs are timed (profile.py) or chosen (warmup.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from tyro.conf import arg

from jspark.errors import UserError
from jspark.flags import EngineFlags, ModelFlags, SpeculationFlags, open_llm
from jspark.progress import told

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jspark.llm import LLM
    from jspark.profile import Profile


@dataclass(frozen=True)
class ProfileCommand:
    """Measure the cost table on the engine's own programs, keep it for later runs, and show it."""

    model: ModelFlags
    speculation: SpeculationFlags = field(default_factory=SpeculationFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)
    output: Annotated[str | None, arg(metavar="FILE", help_behavior_hint="(default: none, only the table)")] = None
    """The table as JSON, which --speculative-dspark-sps-table-path reads; a picture is put beside it."""

    def run(self) -> int:
        """Measures every program, or those of --profile-seconds, even where a table was kept."""
        from jspark.bench import report

        output = None if self.output is None else Path(self.output)
        if output is not None:
            report.check_output(output)
        if self.speculation.speculative_dspark_sps_table_path is not None:
            raise UserError(
                "the table is measured here and one was given; drop --speculative-dspark-sps-table-path"
            )
        # No policy, so that nothing is measured before.
        llm = open_llm(self.model, replace(self.speculation, verify_policy="full"), self.engine)
        command = "jspark profile"
        for flags in (self.model, self.speculation, self.engine):
            command = report.command_line(command, flags)
        record = report.describe("profile", command, llm.target.mesh)
        with told("measuring the cost table") as tell:
            profile = llm.engine.profile(fresh=True, limit=self.engine.profile_seconds or None, tell=tell)
        record |= profile.to_dict() | {"results": results(llm, profile)}
        if output is not None:
            report.save(record, output, lambda axes: draw(record, axes))
        show(record)
        return 0


@dataclass(frozen=True)
class Warmup:
    """Measure the cost table and compile the programs that a server needs, into the caches of later starts."""

    model: ModelFlags
    speculation: SpeculationFlags = field(default_factory=SpeculationFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)

    def run(self) -> int:
        """Compiles them all. What is ready when it is interrupted stays in the cache."""
        from jspark.warmup import warm_set

        with told("measuring the cost table") as tell:
            llm = open_llm(self.model, self.speculation, self.engine, measure_cost=True, tell=tell)
        engine = llm.engine
        shapes = warm_set(engine)
        with told("compiling") as tell:
            for i, shape in enumerate(shapes):
                tell(i, len(shapes), f"R {shape.rows}, T {shape.packed}")
                engine.programs.compile(shape)
        report = engine.programs.report
        table = "none" if engine.cost is None else f"of {len(engine.cost.verify)} tiers"
        Console(stderr=True, highlight=False).print(
            f"{report.programs} programs ready in {report.seconds:.1f} s · cost table {table}", soft_wrap=True
        )
        return 0


def results(llm: LLM, profile: Profile) -> dict[str, Any]:
    """What belongs beside a table: whose it is, and the floor of verification at the short context."""
    from jspark.bench import ceilings
    from jspark.models.drafter import Drafter

    engine, limits = llm.engine, ceilings.measure(llm.target.mesh, llm.target.dtype)
    context, drafter = min(profile.context, default=0), engine.drafter
    floors = {}
    for tokens in profile.table.verify:
        rows = min((r for r in engine.config.row_buckets if r * (engine.block_size + 1) >= tokens), default=1)
        work = ceilings.target_pass(llm.target.model, llm.target.config, rows=rows, tokens=tokens, context=context)
        if isinstance(drafter, Drafter):
            work += ceilings.inject_pass(drafter, tokens=tokens)
        floors[tokens] = limits.floor(work).seconds
    return {
        "model": llm.target.name,
        "dtype": llm.target.dtype,
        "algorithm": llm.algorithm,
        "block_size": engine.block_size,
        "verify_floor_seconds": floors,
        "read_bytes_per_second": limits.read_bandwidth,
        "matmul_flops_per_second": limits.matmul_rate,
    }


def show(record: dict[str, Any]) -> None:
    """Prints the table."""
    from jspark.bench import report

    about, measured = record["results"], record["measured"]
    timed = {t for _, t, _ in measured["verify"]}
    rows = [
        ("draft", f"R {r}", f"{s * 1e3:.3f}", "", "" if r in measured["draft"] else "interpolated")
        for r, s in record["draft"].items()
    ]
    for t, s in record["verify"].items():
        floor = about["verify_floor_seconds"][t]
        rows.append(
            ("verify", f"T {t}", f"{s * 1e3:.3f}", f"{floor * 1e3:.3f}", "" if t in timed else "interpolated")
        )
    report.show(
        f"{about['model']}, {about['algorithm']}, γ {about['block_size']}, {about['dtype']}",
        ("part", "size", "ms", "floor ms", ""),
        rows,
        (
            f"Context: {record['context'] * 1e6:.3g} ms for a thousand tokens of all rows together. "
            f"Measured in {measured['seconds']:.1f} s.",
        ),
    )


def draw(record: dict[str, Any], axes: Axes) -> None:
    """Verification by T with its floor, drafting by R, and the context term."""
    about, measured = record["results"], record["measured"]
    verify, draft = record["verify"], record["draft"]
    timed = sorted({t for _, t, _ in measured["verify"]})
    axes.plot(list(verify), [s * 1e3 for s in verify.values()], color="#2a6f97", label="verify, by T")
    axes.plot(timed, [verify[t] * 1e3 for t in timed], "o", color="#2a6f97")
    floors = about["verify_floor_seconds"]
    axes.plot(list(floors), [s * 1e3 for s in floors.values()], "--", color="#d1495b", label="floor of verify")
    known = list(measured["draft"])
    axes.plot(list(draft), [s * 1e3 for s in draft.values()], color="#e09f3e", label="draft, by R")
    axes.plot(known, [draft[r] * 1e3 for r in known], "o", color="#e09f3e")
    axes.plot([], [], " ", label=f"context: {record['context'] * 1e6:.3g} ms per 1,000 tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("packed tokens T, or rows R")
    axes.set_ylabel("ms")
    axes.set_title(f"Cost of a step: {about['model']}, {about['algorithm']}, γ {about['block_size']}", loc="left")
    axes.legend(frameon=False)

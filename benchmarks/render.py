"""Prints the README's tables of figures from the committed records; a test holds the README to its output."""

import json
from pathlib import Path

HERE = Path(__file__).parent


def read(name: str) -> dict:
    """One record."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def cpu() -> str:
    """Plain decoding on the CPU, beside transformers."""
    record = read("cpu/plain_decode.json")
    r, device = record["results"], record["device"]
    ours, theirs, floor = r["jspark"], r["transformers"], r["floor"]
    threads = f"{theirs['threads']} torch thread (its faster choice)"
    return "\n".join(
        [
            f"| plain decoding of smollm2-135m, float32, {device['cores']} cores of an {device['kind']} | "
            "ms a token | tokens/s |",
            "| --- | --- | --- |",
            f"| jspark | {ours['ms_per_token']:.1f} | {ours['tokens_per_second']:.1f} |",
            f"| transformers' `generate`, same run, same tokens, {threads} | {theirs['ms_per_token']:.1f} | "
            f"{theirs['tokens_per_second']:.1f} |",
            f"| floor: reading the weights once a token | {floor['ms_per_token']:.1f} | |",
        ]
    )


def demo() -> str:
    """The demo on the CPU, question by question."""
    record = read("cpu/demo.json")
    r, device = record["results"], record["device"]
    lines = [
        f"| `make demo`: {r['model']}, {r['dtype']}, γ {r['block_size']}, {device['cores']} cores of an "
        f"{device['kind']}, load average {device['load_average']:.0f} | τ | tokens/s | plain | speed-up |",
        "| --- | --- | --- | --- | --- |",
    ]
    for q in r["questions"]:
        ours, plain = q["arms"].values()
        lines.append(
            f"| {q['question']} | {ours['accept_length']:.2f} | {ours['tokens_per_second']:.1f} | "
            f"{plain['tokens_per_second']:.1f} | {q['speed_up']:.2f} |"
        )
    return "\n".join(lines)


def engine() -> str:
    """Tokens a second of the arms of `jspark bench engine` on the CPU, by concurrency."""
    record = read("cpu/engine.json")
    r, device = record["results"], record["device"]
    names = list(r["cells"][0]["arms"])
    lines = [
        f"| tokens/s: {r['model']}, {r['dtype']}, greedy, γ {r['block_size']}, {device['cores']} cores of an "
        f"{device['kind']} | " + " | ".join(names) + " | τ, mean window of compact |",
        "| --- " * (len(names) + 2) + "|",
    ]
    for cell in r["cells"]:
        arms, n = cell["arms"], cell["concurrency"]
        rates = " | ".join(f"{arms[name]['tokens_per_second']:.1f}" for name in names)
        compact = arms["compact"]
        lines.append(
            f"| {n} request{'s' if n > 1 else ''} at a time | {rates} | "
            f"{compact['accept_length']['value']:.2f}, {compact['mean_window']:.2f} |"
        )
    return "\n".join(lines)


def kernels() -> str:
    """Ragged attention on the H200, case by case."""
    r = read("h200/kernels.json")["results"]
    lines = [
        "| ragged attention on one H200, bfloat16 | Mosaic µs | floor µs | Triton | XLA | cuDNN | reached | bar |",
        "| --- " * 8 + "|",
    ]
    cases: dict[str, dict[str, dict]] = {}
    for op in r["ops"]:
        cases.setdefault(op["case"], {})[op["version"]] = op
    for name, ops in cases.items():
        mosaic = ops["mosaic"]
        others = " | ".join(f"{ops[v]['us']:.0f}" for v in ("triton", "xla", "cudnn"))
        form = ".1f" if mosaic["unit"] == "µs" else ".2f" if mosaic["bar"] < 100 else ".0f"
        lines.append(
            f"| {name} | {mosaic['us']:.1f} | {mosaic['floor_us']:.1f} | {others} | "
            f"{mosaic['achieved']:{form}} {mosaic['unit']} | {mosaic['bar']:g} |"
        )
    return "\n".join(lines)


def steps() -> str:
    """Whole steps on the H200, with kernels and without."""
    lines = [
        "| ms on one H200, bfloat16, context 1,024, γ 7 | R | verify, kernels | XLA | propose, kernels | XLA |",
        "| --- " * 6 + "|",
    ]
    rows = read("h200/step_attention.json")["results"]["programs"]
    for ours in (row for row in rows if row["backend"] == "auto"):
        [xla] = [x for x in rows if (x["shape"], x["rows"], x["backend"]) == (ours["shape"], ours["rows"], "xla")]
        figures = " | ".join(f"{row[part]:.2f}" for part in ("verify_ms", "propose_ms") for row in (ours, xla))
        lines.append(f"| {ours['shape']} | {ours['rows']} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(cpu(), demo(), engine(), kernels(), steps(), sep="\n\n")

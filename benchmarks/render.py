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


def h200() -> str:
    """Step times on the H200."""
    lines = [
        "| smollm2-135m on one H200, context 1,024, γ 7 | R | T | bfloat16 ms | floor | float32 ms | floor |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    half, full = (read(f"h200/step_smollm2_{d}.json")["results"]["programs"] for d in ("bfloat16", "float32"))
    for a, b in zip(half, full, strict=True):
        cells = (a["ms"], a["floor_ms"], b["ms"], b["floor_ms"])
        figures = " | ".join(f"{x:.2f}" for x in cells)
        lines.append(f"| {a['program']} | {a['rows']} | {a['tokens']} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(cpu(), demo(), engine(), h200(), sep="\n\n")

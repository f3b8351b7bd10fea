"""The tiny target of the tests in a folder of its own, with a tokenizer.

Knows: where the tests keep it. Does not know: what it is used for.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from text_model import text_model  # noqa: E402

text_model(ROOT / "tests" / "goldens" / "qwen3_tiny", Path(sys.argv[1]), {})

"""The command `jspark`: its subcommands, and how every run ends.

Knows: exit codes, and that bad input is one line on stderr. Does not know: what the commands do; each is a frozen
dataclass whose fields are its flags, in a module of its own, with `run()` returning the exit code.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import subcommand

import jspark
from jspark.cli_bench import Bench
from jspark.cli_calibrate import Calibrate
from jspark.cli_convert import Convert
from jspark.cli_data import Data
from jspark.cli_eval import Eval
from jspark.cli_generate import Generate
from jspark.cli_info import Info
from jspark.cli_profile import ProfileCommand, Warmup
from jspark.cli_serve import Serve
from jspark.cli_train import Train
from jspark.demo import Demo
from jspark.errors import JsparkWarning, UserError
from jspark.flags import in_flags

Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Serve, subcommand("serve")]
    | Annotated[Info, subcommand("info")]
    | Annotated[ProfileCommand, subcommand("profile")]
    | Annotated[Warmup, subcommand("warmup")]
    | Annotated[Convert, subcommand("convert")]
    | Annotated[Data, subcommand("data")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Calibrate, subcommand("calibrate")]
    | Annotated[Eval, subcommand("eval")]
    | Annotated[Demo, subcommand("demo")]
    | Annotated[Bench, subcommand("bench")]
)
#: Flags without the names of their groups, lists by repetition, no --no-… twins.
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction, tyro.conf.FlagCreatePairsOff)


_SHOW_WARNING = warnings.showwarning


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 2 for bad input, 130 after Ctrl-C, 141 when nobody reads."""
    args = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:
        print("jspark: error: standard output is closed; open it, or send it to /dev/null", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal's encoding lacks must not end an answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    if args == ["--version"]:
        print(f"jspark {jspark.__version__}")
        return 0
    try:
        command = tyro.cli(Command, args=args, prog="jspark", description=jspark.__doc__, config=STYLE)
        code = command.run()
        sys.stdout.flush()
    except UserError as e:
        print("jspark: error:", in_flags(" ".join(str(e).split())), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as e:
        print(
            f"jspark: error: reading or writing failed ({e}); check the place and its free space", file=sys.stderr
        )
        _drop_output()
        return 2
    return code


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **rest: Any) -> None:
    """Ours as a line that users can read, without the place in the code."""
    if issubclass(category, JsparkWarning):
        print("jspark: warning:", message, file=sys.stderr)
    else:
        _SHOW_WARNING(message, category, *place, **rest)


def _drop_output() -> None:
    """What is still buffered would be written at exit, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The command line: python -m stages COMMAND. `make` calls nothing else."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from stages import STAGES


def main(arguments=None) -> int:
    options = _parser().parse_args(arguments)
    if not hasattr(options, "command"):
        _parser().print_help()
        return 0
    try:
        return options.command(options) or 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = open(os.devnull, "w")
        return 0
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        print(f"{type(error).__name__}: {error or 'this shape needs more memory than there is'}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed here: `make doctor` says how to get it", file=sys.stderr)
        return 2


# -- commands ---------------------------------------------------------------------------------------------------------


def run(options) -> int:
    """Check stages against the float64 reference, then time them."""
    from common import climb

    problem = _problem(options)
    chosen = [STAGES[n] for n in options.stages] or list(STAGES.values())
    return climb.climb(chosen, problem, on=options.on, as_json=options.json, alone=len(options.stages) == 1)


def list_(options) -> int:
    """The stages and their ideas."""
    if options.json:
        print(json.dumps([dict(number=s.number, name=s.name, file=s.file, idea=s.idea) for s in STAGES.values()], indent=1))
    else:
        for stage in STAGES.values():
            print(f"stage {stage.number}  {stage.name:<10} {stage.idea}")
    return 0


def diff(options) -> int:
    """What a stage changes in the one before it."""
    from common import show

    before = STAGES.get(options.stage - 1)
    if before is None:
        raise ValueError("STAGE must be 2 or more: nothing comes before stage 1")
    color = {"always": True, "never": False}.get(options.color, sys.stdout.isatty())
    print(show.diff(STAGES[options.stage], before, color=color))
    return 0


def doctor(options) -> int:
    """What this machine has, what it lacks, and the command that would mend that."""
    from common import device

    device.doctor(as_json=options.json)
    return 0


def timings(options) -> int:
    """Measure the table of this machine."""
    from common import bench

    return bench.timings(save=options.save, commit=options.commit, quick=options.quick, as_json=options.json)


def bugs(options) -> int:
    """Run the planted bugs, and say what catches each."""
    from stages import bugs as planted

    return planted.main(names=options.names, as_json=options.json)


def resources(options) -> int:
    """Compile every kernel for seven architectures, without a GPU: registers, shared memory, spills."""
    from common import resources as compiler

    return compiler.main(write=options.write)


def trace(options) -> int:
    """Watch every memory access of a stage, on the CPU, by source line."""
    from common import watch

    return watch.main(STAGES[options.stage], _problem(options), options.picture, options.json)


def traffic(options) -> int:
    """The global bytes that each CUDA stage asks for: a table and a bar chart."""
    from common import watch

    return watch.traffic(_problem(options), options.picture, options.json)


def try_(options) -> int:
    """Examine a kernel of your own against a stage: traced, checked, timed."""
    from common import attempt

    return attempt.main(options.file, options.like, _problem(options), options.on, options.json)


def sanitize(options) -> int:
    """Run NVIDIA's compute-sanitizer on a stage; without a GPU, trace it instead."""
    from common import nvidia

    return nvidia.sanitize(STAGES[options.stage], _problem(options), options.json)


def profile(options) -> int:
    """Run NVIDIA's Nsight Compute on a stage (default: all), beside what the trace counts."""
    from common import nvidia

    return nvidia.profile(STAGES.get(options.stage), _problem(options), options.json, options.save, options.commit)


# -- arguments --------------------------------------------------------------------------------------------------------


def _stage(text: str) -> int:
    if not text.isdigit() or int(text) not in STAGES:
        raise argparse.ArgumentTypeError(f"stages are {', '.join(map(str, STAGES))}, not {text!r}")
    return int(text)


def _cuda_stage(text: str) -> int:
    number = _stage(text)
    if not STAGES[number].is_cuda:
        cuda = ", ".join(str(n) for n, stage in STAGES.items() if stage.is_cuda)
        raise argparse.ArgumentTypeError(f"stage {number} is not a CUDA source; {cuda} are")
    return number


def _at_least(least: int):
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"a whole number is wanted, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"at least {least} is wanted, not {value}")
        return value

    return number


def _shape(parser, N=1024):
    parser.add_argument("--n", type=_at_least(1), default=N, help="sequence length (default %(default)s)")
    parser.add_argument("--d", type=int, choices=(32, 64, 128), default=64, help="head size (default %(default)s)")
    parser.add_argument("--heads", type=_at_least(1), default=1, help="heads (default %(default)s)")
    parser.add_argument("--batch", type=_at_least(1), default=1, help="batch (default %(default)s)")
    parser.add_argument("--causal", action="store_true", help="query row sees keys 0..row only")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of the random inputs (default %(default)s)")


def _problem(options):
    from common.problem import Problem

    return Problem(options.batch, options.heads, options.n, options.d, options.causal, seed=options.seed)


def _parser():
    parser = argparse.ArgumentParser(prog="python -m stages", description="FlashAttention, stage by stage.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def command(function, name=None):
        name = name or function.__name__
        added = commands.add_parser(name, help=function.__doc__.split("\n")[0], description=function.__doc__)
        added.set_defaults(command=function)
        return added

    one = command(run)
    one.add_argument("stages", nargs="*", type=_stage, metavar="STAGE", help="default: all")
    _shape(one)
    one.add_argument("--on", choices=("gpu", "cpu", "trace"), help="default: the GPU where there is one")

    listing = command(list_, "list")

    one = command(diff)
    one.add_argument("stage", type=_stage, metavar="STAGE")
    one.add_argument("--color", choices=("auto", "always", "never"), default="auto")

    examined = command(doctor)

    measured = command(timings)
    measured.add_argument("--quick", action="store_true", help="fewer runs; never saved as a record")

    planted = command(bugs)
    planted.add_argument("names", nargs="*", metavar="BUG", help="default: all")

    compiled = command(resources)
    compiled.add_argument("--write", action="store_true", help="rewrite stages/resources.md")

    traced = command(trace)
    traced.add_argument("stage", type=_cuda_stage, metavar="STAGE")
    compared = command(traffic)
    for added in (traced, compared):
        _shape(added, N=256)
        added.add_argument("--picture", type=Path, metavar="PATH", help="write a picture (.png, .svg, .pdf)")

    tried = command(try_, "try")
    tried.add_argument("file", type=Path, metavar="FILE.cu")
    tried.add_argument("--like", type=_cuda_stage, required=True, metavar="STAGE", help="whose arguments and constants it has")
    tried.add_argument("--on", choices=("gpu", "cpu"), help="default: the GPU where there is one")
    _shape(tried)

    nvidia = [command(sanitize), command(profile)]
    nvidia[0].add_argument("stage", type=_cuda_stage, metavar="STAGE")
    nvidia[1].add_argument("stage", type=_cuda_stage, nargs="?", metavar="STAGE", help="default: all, at four shapes, kept as a record")
    for added in nvidia:
        _shape(added, N=256)
    for added in (measured, nvidia[1]):
        added.add_argument("--save", type=Path, metavar="PATH", help="where the record goes (default: under stages/timings)")
        added.add_argument("--commit", help="of a tree without its history")

    for added in (commands.choices["run"], listing, examined, measured, planted, traced, compared, tried, *nvidia):
        added.add_argument("--json", action="store_true", help="print data, not tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())

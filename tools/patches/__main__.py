"""The command line for editing the patched llama.cpp and exporting the patch series.

python -m tools.patches edit DIR                  the patched tree, one commit per patch
python -m tools.patches edit DIR --onto VERSION   the same for another llama-cpp-python
python -m tools.patches apply CHECKOUT            commit them to a clone of llama.cpp, or of a fork
python -m tools.patches export DIR                write patches/ from the commits
python -m tools.patches check                     list errors in patches/, exit with status 1 if any
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import (
    PIN_FILE,
    VENDORED,
    concerns_wheel,
    fetch_sdist,
    patches_dir,
    read_upstream,
)
from tools.patches.edit import (
    BRANCH,
    OLD,
    OLD_PATCHED,
    apply_to,
    carry,
    edit,
    fetch_release,
    refuse_existing,
)
from tools.patches.export import export, find_faults
from tools.patches.repository import PRISTINE


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except BuildError as error:
        print(f"Error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"Error: {error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    return 1


def _edit(options: argparse.Namespace) -> int:
    directory, onto, patches = options.directory.absolute(), options.onto, patches_dir()
    refuse_existing(directory)  # before anything is fetched
    log = BuildLog(cache_dir() / "logs" / "patches.log")
    sdist = fetch_sdist(patches, cache_dir(), log)
    tree = directory / VENDORED
    if onto is None:
        edit(sdist, directory, patches)
        print(f"{tree}: llama.cpp, every patch a commit after the tag {PRISTINE}")
        print(f"{directory}: the same for the patches of wheel/")
        print(f"our own files in it are links to {patches / 'src'}")
        print("next: edit; git commit --amend, or git rebase -i pristine; then")
        print(f"  python -m tools.patches export {directory}")
        return 0
    release = fetch_release(onto, cache_dir(), log)
    upstream, stopped = carry(sdist, release, onto, directory, patches)
    for stop in stopped:
        where = directory if concerns_wheel(stop.patch.relative_to(patches).as_posix()) else tree
        files = f"conflicts in {', '.join(stop.files)}" if stop.files else stop.reason
        print(f"{stop.patch.relative_to(patches)}: {files}")
        print(f"  in {where}: resolve, git add, git am --continue, until the last patch is in")
        print(f"  what changed upstream: git diff {OLD} {PRISTINE} -- FILE")
    if not stopped:
        print(f"every patch applies to llama-cpp-python {onto}")
    print("see what happened to the patches:")
    print(f"  git range-diff {OLD}..{OLD_PATCHED} {PRISTINE}..HEAD")
    print(f"compile and test it: make test-edited EDITED={directory}")
    print(f"then write into {patches / PIN_FILE}")
    print(f'  version = "{onto}"')
    print(f'  sha256 = "{upstream.sha256}"')
    print(f'  commit = "{upstream.commit}"')
    print("  revision = 1")
    print(f"and run: python -m tools.patches export {directory}")
    return 0


def _apply(options: argparse.Namespace) -> int:
    checkout, patches = options.checkout.absolute(), patches_dir()
    log = BuildLog(cache_dir() / "logs" / "patches.log")
    stop = apply_to(checkout, fetch_sdist(patches, cache_dir(), log), patches)
    if stop is not None:
        files = f"conflicts in {', '.join(stop.files)}" if stop.files else stop.reason
        print(f"{stop.patch.name}: {files}")
        print(f"  in {checkout}: resolve, git add, git am --continue, until the last patch is in")
        print("  leave it out: git am --skip; give up: git am --abort")
        return 1
    print(f"{checkout}: every patch is a commit of the branch {BRANCH}")
    print("next: build llama.cpp there, then instr exec -- PROGRAM ...")
    return 0


def _export(options: argparse.Namespace) -> int:
    exported = export(options.directory.absolute(), patches_dir())
    for name in exported.changed:
        print(f"written: {name}")
    for name in exported.removed:
        print(f"removed: {name}")
    print(f"unchanged: {len(exported.unchanged)} patches")
    if exported.changed or exported.removed:
        print("next: python -m tools.patches check; instr build")
    return 0


def _check(_: argparse.Namespace) -> int:
    patches = patches_dir()
    log = BuildLog(cache_dir() / "logs" / "patches.log")
    faults = find_faults(fetch_sdist(patches, cache_dir(), log), patches)
    for fault in faults:
        print(fault)
    if not faults:
        version = read_upstream(patches).version
        print(f"the series is canonical and applies to llama-cpp-python {version}")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.patches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("edit", help="make the patched tree, every patch a commit")
    command.set_defaults(run=_edit)
    command.add_argument("directory", type=Path, metavar="DIR", help="new, or empty")
    about = "carry the series over to this llama-cpp-python; what does not apply is merged"
    command.add_argument("--onto", type=_version, metavar="VERSION", help=about)
    command = commands.add_parser("apply", help="commit the patches to a clone of llama.cpp")
    command.set_defaults(run=_apply)
    command.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a tag, or a fork")
    command = commands.add_parser("export", help="write patches/ from the commits of DIR")
    command.set_defaults(run=_export)
    command.add_argument("directory", type=Path, metavar="DIR", help="made by edit")
    command = commands.add_parser("check", help="name what is wrong with patches/")
    command.set_defaults(run=_check)
    return parser


def _version(text: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)+", text):
        raise argparse.ArgumentTypeError(f"expected a version such as 0.3.36, got {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

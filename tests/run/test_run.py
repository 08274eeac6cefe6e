"""`instr run`, through the real command line and the real library."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.run.session import _text_written
from tests.conftest import Instr, assert_refused, read_events, start_run
from tests.kit import tiny_models
from tests.kit.mutants import text, write_mutant
from tests.kit.native_kit import open_llama

pytestmark = pytest.mark.native

OLD_LOG = Path(__file__).parent.parent / "fixtures" / "every-event.log"
DEMO = ("demo", "--threads", "1")  # more threads than free processors wait for each other
PROMPT = "Once upon a time there was a little"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} ->"


@pytest.fixture(scope="module")
def peer(demo_model: Path) -> Iterator[Any]:
    """llama-cpp-python's own loop over the same model."""
    with_chat = open_llama(demo_model, n_ctx=512, seed=1)
    yield with_chat
    with_chat.close()


def greedy_text(peer: Any, prompt: str, n: int) -> str:
    peer.reset()
    done = peer.create_completion(prompt, max_tokens=n, temperature=0, top_k=1, repeat_penalty=1)
    return done["choices"][0]["text"]


def test_the_text_is_the_plain_libraries(instr: Instr, peer: Any) -> None:
    done = instr("run", *DEMO, "-p", PROMPT, "-n", 48, "--ctx", 512)
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy_text(peer, PROMPT, 48) + "\n"
    assert len(done.stdout) > 60


def test_a_second_beginning_of_a_text_is_warned_of(instr: Instr) -> None:
    """The demo model adds one; the tokens are made in a child process."""
    warning = "llama.cpp: tokenize: Added a BOS token to the prompt"
    done = instr("run", *DEMO, "-p", "<s>Once", "-n", 1)
    assert done.stderr.count(warning) == 1
    assert warning not in instr("run", *DEMO, "-p", "Once", "-n", 1, "--force").stderr


def test_the_log_holds_every_token_of_the_text(instr: Instr, tmp_path: Path) -> None:
    done = instr("run", *DEMO, "-p", PROMPT, "-n", 20)
    tokens = read_events(tmp_path / "session.log", "token")
    assert "".join(token["text"] for token in tokens) + "\n" == done.stdout
    steps = read_events(tmp_path / "session.log", "step_begin")
    assert [step["phase"] for step in steps] == ["prefill"] + ["decode"] * 19
    assert read_events(tmp_path / "session.log")[-1]["event"] == "session_end"


def test_small_batches_change_nothing(instr: Instr, peer: Any) -> None:
    done = instr("run", *DEMO, "-p", PROMPT * 4, "-n", 16, "--batch", 8, "--ubatch", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy_text(peer, PROMPT * 4, 16) + "\n"


def test_a_prompt_from_standard_input_or_a_file(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    texts = [
        instr("run", *DEMO, "-n", 8, "--force", *args, input=PROMPT + "\n").stdout
        for args in (
            ("-p", PROMPT), ("-p", "-"), ("--prompt-file", "-"), ("--prompt-file", "prompt.txt"),
        )
    ]  # fmt: skip
    assert len(texts[0]) > 8
    assert texts == texts[:1] * 4


def test_sampling_with_a_seed_repeats_itself(instr: Instr) -> None:
    def text(seed: int) -> str:
        return instr(
            "run", *DEMO, "-p", PROMPT, "-n", 48, "--temp", 1.5, "--top-k", 50, "--top-p", 0.99,
            "--min-p", 0.001, "--seed", seed, "--force",
        ).stdout  # fmt: skip

    texts = [text(seed) for seed in (1, 2, 1)]
    assert len(texts[0]) > 8
    assert texts[0] == texts[2] != texts[1]


def test_a_seed_that_nobody_gave_stands_in_the_log(instr: Instr, tmp_path: Path) -> None:
    first = instr("run", *DEMO, "-p", PROMPT, "-n", 32, "--temp", 1.5)
    args = read_events(tmp_path / "session.log")[0]["args"]
    again = instr("run", *DEMO, "-p", PROMPT, "-n", 32, "--temp", 1.5, "--force",
                  "--seed", args["sampling"]["seed"])  # fmt: skip
    assert len(first.stdout) > 8
    assert again.stdout == first.stdout


def test_whole_characters_only() -> None:
    """Tokens that are single bytes: nothing is written before the character is complete."""

    class Bytes:
        def piece(self, token: int) -> bytes:
            return bytes([token])

    out = io.BytesIO()
    seen = []
    with _text_written(Bytes(), out) as write:  # type: ignore[arg-type]
        for byte in "é€".encode() + b"\xff" + "😀".encode()[:2]:
            write(byte)
            seen.append(out.getvalue().decode())
    assert seen == ["", "é", "é", "é", "é€", "é€�", "é€�", "é€�"]
    assert out.getvalue().decode() == "é€��\n"


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """The demo model with a template that begins with BOS."""
    return write_mutant(tmp_path / "chat.gguf", {"chat_template": text(TEMPLATE)})


def test_chat_uses_the_models_own_template(instr: Instr, chat_model: Path, peer: Any) -> None:
    done = instr("run", chat_model, "--chat", "-p", "a story", "-n", 24)
    assert done.returncode == 0, done.stderr
    # one BOS: those of the template and of the tokenizer are not both added
    assert done.stdout == greedy_text(peer, "[user] a story ->", 24) + "\n"


def test_embeddings_are_the_models(instr: Instr, models: Path) -> None:
    prompts = ("-p", "hello world", "-p", "other")
    # llama-cpp-python leaves flash attention off, which rounds differently
    done = instr("run", models / "bert.gguf", "--embed", *prompts, "--flash-attn", "off")
    assert done.returncode == 0, done.stderr
    ours = [json.loads(line) for line in done.stdout.splitlines()]
    peer = open_llama(models / "bert.gguf", embedding=True)
    theirs = [peer.embed(text) for text in ("hello world", "other")]
    peer.close()
    assert len(ours) == 2
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_decoders_and_encoder_decoders_embed(instr: Instr, models: Path, name: str) -> None:
    done = instr("run", models / f"{name}.gguf", "--embed", "-p", "hello world")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert len(values) == 32
    assert len(set(values)) > 16


def test_an_encoder_decoder_encodes_then_decodes(
    instr: Instr, models: Path, tmp_path: Path
) -> None:
    done = instr("run", models / "t5.gguf", "-p", "hello world", "-n", 3)
    assert done.returncode == 0, done.stderr
    steps = read_events(tmp_path / "session.log", "step_begin")
    assert [(step["kind"], step["n_tokens"]) for step in steps] == [
        ("encode", 3), ("decode", 1), ("decode", 1), ("decode", 1),
    ]  # fmt: skip


def test_repeat_marks_a_warm_up_and_runs(instr: Instr, tmp_path: Path) -> None:
    once = instr("run", *DEMO, "-p", PROMPT, "-n", 8)
    done = instr("run", *DEMO, "-p", PROMPT, "-n", 8, "--repeat", 3, "--log", "three.log")
    assert done.stdout == once.stdout * 3
    marks = read_events(tmp_path / "three.log", "mark")
    assert [(mark["name"], mark["phase"]) for mark in marks] == [
        ("warm-up", "begin"), ("warm-up", "end"),
        ("run 1", "begin"), ("run 1", "end"),
        ("run 2", "begin"), ("run 2", "end"),
    ]  # fmt: skip


def test_a_full_context_stops_with_a_word(instr: Instr) -> None:
    done = instr("run", *DEMO, "-p", PROMPT, "-n", 500, "--ctx", 16, "--temp", 2, "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert "the context of 16 tokens is full" in done.stderr


def test_stats_are_recorded_and_leave_the_text_alone(instr: Instr, tmp_path: Path) -> None:
    plain = instr("run", *DEMO, "-p", PROMPT, "-n", 8)
    done = instr("run", *DEMO, "-p", PROMPT, "-n", 8, "--stats", "^l_out-", "--log", "s.log")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert {e["name"] for e in read_events(tmp_path / "s.log", "tensor_stats")} == {
        f"l_out-{layer}" for layer in range(4)
    }


def test_a_nan_stops_when_asked(instr: Instr, tmp_path: Path) -> None:
    tiny_models.write_llama(tmp_path / "nan.gguf", nan_in="blk.1.ffn_norm.weight")
    run = ("run", "nan.gguf", "-p", "hello", "-n", 4, "--threads", 1, "--stats", "^ffn_norm-")
    done = instr(*run, "--stop-on-nan")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("Error: stopped: a tensor that '^ffn_norm-' matches held a NaN")
    stats = read_events(tmp_path / "session.log", "tensor_stats")
    assert [(event["layer"], event["nan"] > 0) for event in stats] == [(0, False), (1, True)]
    assert read_events(tmp_path / "session.log")[-1]["event"] == "session_end"
    assert instr(*run, "--force").returncode == 0


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        ("demo", (), ("no prompt",)),
        ("demo", ("-p", "a", "-p", "b"), ("several prompts",)),
        ("demo", ("-p", "a", "--prompt-file", "b"), ("not both",)),
        ("demo", ("--prompt-file", "missing.txt"), ("missing.txt", "No such file")),
        ("demo", ("-p", "a", "--level", "loud"), ("loud",)),
        ("demo", ("-p", "a", "--cache-type-k", "q9"), ("--cache-type-k", "q9")),
        ("demo", ("-p", "a", "--cache-type-v", "q4_k"), ("--cache-type-v", "q4_k")),
        (
            "demo",
            ("-p", "a", "--cache-type-v", "q8_0", "--flash-attn", "off"),
            ("--cache-type-v q8_0", "flash attention"),
        ),
        ("demo", ("-p", "a", "--flash-attn", "maybe"), ("maybe",)),
        ("demo", ("-p", "a", "-n", "-1"), ("-n",)),
        ("demo", ("-p", "a", "-n", "many"), ("many",)),
        ("demo", ("-p", "a", "--ctx", "0"), ("--ctx",)),
        ("demo", ("-p", "a", "--batch", "-3"), ("--batch",)),
        ("demo", ("-p", "a", "--threads", "513"), ("--threads",)),
        ("demo", ("-p", "a", "--temp", "-1"), ("--temp",)),
        ("demo", ("-p", "a", "--top-k", "5"), ("--top-k", "--temp")),
        ("demo", ("-p", "a", "--temp", "1", "--top-p", "1.5"), ("--top-p",)),
        ("demo", ("-p", "a", "--seed", "-1"), ("--seed",)),
        ("demo", ("-p", "a", "--repeat", "0"), ("--repeat",)),
        ("demo", ("-p", "a", "--stop-on-nan"), ("--stats",)),
        ("demo", ("-p", "a", "--stats", "("), ("(",)),
        ("demo", ("-p", "a", "--chat", "--embed"), ("--chat", "--embed")),
        ("demo", ("-p", "a", "--on-log-error", "ignore"), ("ignore",)),
        ("demo", ("-p", "word " * 500, "--ctx", "64"), ("holds 64; make the context larger",)),
        ("bert.gguf", ("--embed", "-p", "a" * 99, "--ubatch", "16"), ("20 tokens", "make n_batch")),
        ("demo", ("-p", "a", "--log", "."), ("is a directory",)),
        ("demo", ("-p", "a", "--log", "-", "--perfetto", "t"), ("--perfetto", "--log -")),
        ("demo", ("-p", "a", "--log", "none/s.log"), ("none/s.log", "does not exist")),
        ("llama.gguf", ("-p", ""), ("prompt is empty", "BOS")),
        ("llama.gguf", ("-p", "a", "--chat"), ("no chat template",)),
        ("llama.gguf", ("-p", "a", "--cache-type-k", "q8_0"), ("32", "heads", "16")),
        ("gpt2.gguf", ("-p", "a", "--ctx", "1000"), ("a context of 1000", "256 positions")),
        ("bert.gguf", ("-p", "a"), ("encoder", "--embed")),
        ("bert.gguf", ("--embed", "-p", "a" * 2000), ("prompt has 400 tokens", "holds 256")),
        ("no_tokenizer.gguf", ("-p", "a"), ("no tokenizer",)),
        ("vocabulary.gguf", ("-p", "a"), ("only a vocabulary",)),
        ("missing.gguf", ("-p", "a"), ("does not exist",)),
        (".", ("-p", "a"), ("is not a model", "config.json")),
    ],
)
def test_wrong_input_is_one_line(
    instr: Instr, models: Path, tmp_path: Path, model: str, args: tuple[str, ...],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    done = instr("run", model if model == "demo" else models / model, *args)
    assert_refused(done, *words)
    assert list(tmp_path.iterdir()) == [], "wrong input leaves no log"


def test_a_model_that_llama_cpp_refuses_is_one_line(
    instr: Instr, models: Path, tmp_path: Path
) -> None:
    data = (models / "llama.gguf").read_bytes()
    (tmp_path / "strange.gguf").write_bytes(
        data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lemur", 1)
    )
    assert_refused(instr("run", "strange.gguf", "-p", "a"), "strange.gguf", "lemur")
    assert not (tmp_path / "session.log").exists()


def test_an_unpatched_library_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text("from . import llama_cpp; __version__ = '0.1'")
    (package / "llama_cpp.py").write_text("import ctypes; _lib = ctypes.CDLL('libc.so.6')")
    environment = environment | {"PYTHONPATH": f"{tmp_path}:{environment['PYTHONPATH']}"}
    done = start_run(environment, tmp_path, "demo", "-p", "a")
    output, errors = done.communicate(timeout=60)
    assert (done.returncode, output) == (2, b"")
    [line] = errors.decode().splitlines()
    assert line.startswith("Error: the installed llama-cpp-python is not the patched one")
    assert line.endswith("run `instr build`")


def test_prompts_that_are_no_text_are_refused(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Ein schöner Tag".encode("latin-1"))
    assert_refused(instr("run", *DEMO, "--prompt-file", "latin.txt"), "latin.txt", "byte 7")
    assert_refused(instr("run", *DEMO, "-p", os.fsdecode(b"sch\xf6n")), "not UTF-8")


def test_a_prompt_is_text_whatever_the_locale_is(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Without UTF-8 in the locale, Python decodes a prompt's bytes differently."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = start_run({**environment, **plain}, tmp_path, "demo", "-p", "schön", "-n", "1")
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 0, errors
    assert read_events(tmp_path / "session.log")[0]["args"]["prompts"] == ["schön"]


def test_a_log_that_exists_is_kept(instr: Instr, tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    log.write_text("precious")
    explicit = ("--log", "session.log")
    assert_refused(instr("run", *DEMO, "-p", "a", *explicit), "session.log exists; use --force")
    assert_refused(instr("run", *DEMO, "-p", "a", "--force"), "session.log is not a log")
    assert log.read_text() == "precious"
    shutil.copyfile(OLD_LOG, log)
    assert instr("run", *DEMO, "-p", "a", "-n", 1, "--force").returncode == 0
    assert read_events(log)[-1]["event"] == "session_end"
    assert list(tmp_path.iterdir()) == [log]


def test_without_log_each_run_has_a_log_of_its_own(instr: Instr, tmp_path: Path) -> None:
    names = ["session.log", "session-2.log", "session-3.log"]
    for name in names:
        done = instr("run", *DEMO, "-p", "a", "-n", 1)
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith(f"\nlog: {name}\n")
        assert read_events(tmp_path / name)[0]["args"]["log"] == name
    assert instr("run", *DEMO, "-p", "a", "-n", 1, "--force").stderr.endswith("log: session.log\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def run_into(
    redirection: str, directory: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """A run whose log goes to standard output, in a shell."""
    line = '"$0" -m llamacpp_instr run demo --threads 1 -p Once -n 8 --log - ' + redirection
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, sys.executable],
        cwd=directory, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("redirection", ["| cat > out", "> out", ">> out"])
def test_the_log_goes_to_standard_output(
    environment: dict[str, str], tmp_path: Path, redirection: str
) -> None:
    (tmp_path / "out").write_text("before\n")
    done = run_into(redirection, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "out").read_text()
    if ">>" in redirection:
        assert log.startswith("before\n")
        log = log.removeprefix("before\n")
    events = [json.loads(line) for line in log.splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("session_start", "session_end")
    text = "".join(event["text"] for event in events if event["event"] == "token")
    assert (len(text) > 8, done.stderr) == (True, f"{text}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("device", "reason"), [("| true", "Broken pipe"), ("> /dev/full", "No")])
def test_a_log_that_standard_output_does_not_take(
    environment: dict[str, str], tmp_path: Path, device: str, reason: str
) -> None:
    done = run_into(device, tmp_path, environment)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"Error: the log cannot be written to standard output: {reason}")
    assert list(tmp_path.iterdir()) == []


def test_no_permission_for_the_log(instr: Instr) -> None:
    assert_refused(instr("run", *DEMO, "-p", "a", "--log", "/proc/session.log"), "/proc")

"""Reading a log: what was written comes back; what is damaged is named with its line."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import reader as log_file
from llamacpp_instr.log import reader as log_module
from llamacpp_instr.log.reader import LogEnd, LogReader, read_events
from llamacpp_instr.log.schema import Event
from tests.kit.made_log import encode, make_log
from tests.kit.strategies import logs, unclosed_logs

EVENTS = make_log(Random(7).randint, n_contexts=2, level="verbose")
LOG = encode(EVENTS)
COMPRESSIONS = {
    "plain": lambda data: data,
    "gzip": gzip.compress,
    "gzip in two members": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
    "zstd": zstandard.ZstdCompressor().compress,
    "zstd in two frames": lambda data: (
        zstandard.ZstdCompressor().compress(data[:100])
        + zstandard.ZstdCompressor().compress(data[100:])
    ),
}


def read(path: Path, data: bytes, lenient: bool = False) -> tuple[list[Event], LogEnd]:
    path.write_bytes(data)
    reader = read_events(path, lenient)
    numbered = list(reader)
    assert all(line >= 1 for line, _ in numbered)
    assert reader.end is not None
    return [event for _, event in numbered], reader.end


def message(path: Path, data: bytes) -> str:
    with pytest.raises(LogError) as raised:
        read(path, data)
    assert raised.value.path == str(path)
    return str(raised.value).replace(str(path), "LOG")


# --- what was written comes back ---


@given(events=logs())
@settings(max_examples=50)
def test_written_events_come_back(events: list[Event], tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("log") / "session.log"
    assert read(path, encode(events))[0] == events


@pytest.mark.parametrize("chunk", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("compress", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_compression_and_chunks_make_no_difference(compress, chunk, path, monkeypatch):
    monkeypatch.setattr(log_file, "CHUNK", chunk)
    events, end = read(path, compress(LOG))
    assert events == EVENTS
    assert end.state == "closed"
    assert end.lines == len(EVENTS)
    assert end.bytes_before_last == len(encode(EVENTS[:-1]))


def test_lines_are_numbered_from_one(path):
    path.write_bytes(LOG)
    assert [line for line, _ in read_events(path)] == list(range(1, len(EVENTS) + 1))


@pytest.mark.parametrize("compress", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_standard_input(compress, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(compress(LOG))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert [event for _, event in read_events("-")] == EVENTS


def test_a_pipe_that_gives_byte_by_byte(path):
    os.mkfifo(path)
    slowly = "import sys\nf = open(sys.argv[1], 'wb', buffering=0)\n"
    slowly += "for byte in sys.stdin.buffer.read(): f.write(bytes([byte]))"
    with subprocess.Popen([sys.executable, "-c", slowly, path], stdin=subprocess.PIPE) as writer:
        assert writer.stdin
        writer.stdin.write(LOG[:3000])
        writer.stdin.close()
        n_lines = sum(1 for _ in read_events(path))
    assert n_lines == LOG[:3000].count(b"\n")


# --- a log that just stops ---


@given(data=st.data())
@settings(max_examples=60)
def test_a_log_cut_anywhere_is_read_up_to_its_last_whole_line(data, tmp_path_factory):
    events = data.draw(logs())
    whole = encode(events)
    first = whole.index(b"\n")
    cut = data.draw(st.integers(first, len(whole)))
    got, end = read(tmp_path_factory.mktemp("log") / "session.log", whole[:cut])
    # the newline alone may be missing: then the line is whole
    n_whole = whole[: cut + 1].count(b"\n")
    assert got == events[:n_whole]
    assert end.lines == n_whole
    if n_whole == len(events):
        assert end.state == "closed"
    else:
        between_lines = cut in (len(encode(got)), len(encode(got)) - 1)
        assert end.state == ("unclosed" if between_lines else "truncated")


@given(events=unclosed_logs())
@settings(max_examples=30)
def test_a_log_without_session_end_is_unclosed(events, tmp_path_factory):
    got, end = read(tmp_path_factory.mktemp("log") / "session.log", encode(events))
    assert (got, end.state) == (events, "unclosed")
    assert end.sentence() == "the log was not closed"


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_compressed_log_cut_anywhere_gives_whole_lines(compress, path):
    data = compress(LOG)
    for cut in range(200, len(data) - 20, len(data) // 23):
        try:
            events, end = read(path, data[:cut])
        except LogError as error:
            assert "nothing was recorded" in str(error)  # noqa: PT017 - not even one line
            continue
        assert events == EVENTS[: len(events)]
        assert end.state != "closed"


# --- damage ---


@given(data=st.data())
@settings(max_examples=60)
def test_lenient_keeps_every_other_line(data, tmp_path_factory):
    events = data.draw(logs())
    lines = encode(events).splitlines(keepends=True)
    damaged = data.draw(st.sets(st.integers(1, len(lines) - 1), min_size=1, max_size=5))
    for i in damaged:
        lines[i] = data.draw(st.sampled_from([b"\n", b"{}\n", b"[1]\n", b"\xff\n", lines[i][1:]]))
    path = tmp_path_factory.mktemp("log") / "session.log"
    got, end = read(path, b"".join(lines), lenient=True)
    assert got == [event for i, event in enumerate(events) if i not in damaged]
    assert end.skipped == len(damaged)
    with pytest.raises(LogError) as raised:
        read(path, b"".join(lines))
    assert raised.value.line == min(damaged) + 1


SYNC = b'{"event":"sync","t":1,"ctx":0,"dur":1'
START = LOG.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (SYNC + b',"more":1}', "sync: unknown field `more`"),
        (b'{"event":"sink","t":1}', "unknown event `sink`"),
        (b'{"t":1}', "no key `event`"),
        (b'{"event":"sync","t":1,"ctx":0}', "sync: Object missing required field `dur`"),
        (b'{"event":"sync","t":1.5,"ctx":0}', "sync: Expected `int`, got `float` - at `t`"),
        (b'{"event":"sync","t":1,"ctx":-1}', "sync: Expected `int` >= 0 - at `ctx`"),
        (b"[]", "not a JSON object"),
        (b"", "an empty line"),
        (SYNC + b"}" + SYNC + b"}", "not a line of JSON"),
        (SYNC, "not a line of JSON"),
        (b'{"event":"message","t":1,"level":"warn","text":"\xff"}', "not a line of JSON"),
        (b'{"event":"note","t":1,"name":"n","data":' + b"[" * 10**5, "nested too deeply"),
    ],
)
def test_a_wrong_line_is_named_and_explained(line, expected, path):
    error = message(path, START + line + b"\n" + SYNC + b"}\n")
    assert error.startswith(f"LOG:2: {expected}")
    assert len(error) < 200


def test_what_is_no_log_is_told_from_what_is_too_new(path):
    no_log = "LOG: not a log: its first line is not a session_start"
    assert message(path, b"GGUF\x03\0\0\0" * 1000) == no_log
    assert message(path, b"hello\n") == no_log
    assert message(path, SYNC + b"}\n") == no_log
    assert message(path, b"[1,2]\n") == no_log
    newer = START.replace(b'"schema":1', b'"schema":7')
    assert message(path, newer + b'{"event":"from the future"}\n').startswith(
        "LOG: written with schema version 7, which this instr cannot read (it reads 1)"
    )


def test_nothing_recorded(path):
    assert message(path, b"") == "LOG: empty: nothing was recorded"
    assert message(path, gzip.compress(b"")) == "LOG: empty: nothing was recorded"
    cut = "LOG: ends in the middle of its first line: nothing was recorded"
    assert message(path, START[:200]) == cut
    assert message(path, START[:5]) == cut


def test_a_file_of_damaged_lines_is_not_a_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MAX_SKIPPED", 3)
    assert read(path, LOG + b"\n" * 3, lenient=True)[1].skipped == 3
    with pytest.raises(LogError, match="more than 3 lines are damaged: not a log") as error:
        read(path, LOG + b"\n" * 4, lenient=True)
    assert error.value.line == LOG.count(b"\n") + 4


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_damaged_compressed_data_is_an_error_and_leniently_an_end(compress, path, monkeypatch):
    monkeypatch.setattr(log_file, "CHUNK", 2000)
    random = Random(1)
    log = LOG + b"".join(encode(make_log(random.randint)[1:]) for _ in range(20))
    data = compress(log)
    data = data[: len(data) // 2] + b"\xff" * 200_000
    assert "the compressed data is damaged from here on" in message(path, data)
    events, end = read(path, data, lenient=True)
    assert (end.state, end.skipped) == ("truncated", 1)
    assert encode(events) == log[: len(encode(events))]
    assert events


def test_a_wrong_checksum_of_compressed_data_is_an_error(path):
    data = bytearray(gzip.compress(LOG))
    data[-5] ^= 1
    assert "the compressed data is damaged" in message(path, bytes(data))


def test_a_line_longer_than_the_bound_is_an_error(path, monkeypatch):
    monkeypatch.setattr(log_module, "MAX_LINE", 100_000)
    monkeypatch.setattr(log_file, "CHUNK", 1000)
    long_line = b'{"event":"message","t":1,"level":"warn","text":"' + b"x" * 200_000
    assert message(path, START + long_line) == "LOG:2: longer than 0 MiB"


def test_missing_directory_unreadable(path, tmp_path):
    with pytest.raises(LogError, match=r"no such file$"):
        read_events(path)
    with pytest.raises(LogError, match=r"is a directory, not a log$"):
        read_events(tmp_path)


def test_bad_lines_are_given_in_their_places(path):
    path.write_bytes(START + b"nonsense\n" + SYNC + b"}\n\n[]\n")
    reasons = {n: i for n, i in LogReader(path, "give").items() if isinstance(i, str)}
    assert [number for number, _ in LogReader(path, "give").items()] == [1, 2, 3, 4, 5]
    assert [*reasons] == [2, 4, 5]
    assert (reasons[4], reasons[5]) == ("an empty line", "not a JSON object")


def test_the_end_in_words():
    assert LogEnd("closed", 9, 0, 0).sentence() == ""
    assert LogEnd("closed", 9, 1, 0).sentence() == "1 damaged line was skipped"
    assert LogEnd("truncated", 9, 2, 0).sentence() == (
        "the log was not closed and ends in the middle of line 10; 2 damaged lines were skipped"
    )


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor(level=19).compress])
def test_a_compressed_log_that_expands_like_no_log_is_refused(compress, path):
    data = START + b'{"event":"mark","t":1,"mark":1,"name":"","phase":"instant"}\n' * 100_000
    packed = compress(data)
    assert len(data) > log_file.MAX_EXPANSION * len(packed)
    assert "expands to more than 100 times its size" in message(path, packed)
    path.write_bytes(data)
    assert sum(1 for _ in read_events(path)) == 100_001


@pytest.mark.parametrize("level", ["minimal", "detailed", "verbose"])
def test_no_sound_log_expands_a_third_as_much(level):
    log = encode(make_log(Random(3).randint, n_contexts=2, level=level))
    smallest = min(
        len(gzip.compress(log, 9)), len(zstandard.ZstdCompressor(level=19).compress(log))
    )
    assert len(log) < log_file.MAX_EXPANSION / 3 * smallest

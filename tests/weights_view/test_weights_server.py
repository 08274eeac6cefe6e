"""The server of the weights' page: what it answers, to whom, and to whom not."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.view.tensors import Tensors, WeightsServer, weight_routes
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.model.file import load_model_file
from tests.kit.block_models import random_rows, write_blocks

pytestmark = pytest.mark.native

PATIENCE_S = 300
RANDOM = np.random.default_rng(2)
MATRIX = RANDOM.normal(size=(300, 512)).astype(np.float32)
OTHER = MATRIX + RANDOM.normal(0, 0.1, MATRIX.shape).astype(np.float32)
TENSORS = {
    "blk.0.ffn_up.weight": MATRIX,
    "output_norm.weight": np.linspace(-1, 1, 96, dtype=np.float32),
    "blk.0.odd.weight": np.ones((2, 3), np.float32),
    "blk.0.lone.weight": np.array([[1, np.nan], [np.inf, 0]], np.float32),
}


@dataclass
class Served:
    path: Path
    server: WeightsServer

    def get(self, path: str, name: str | None = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        own = "/" + self.server.address.split("/", 3)[3]
        connection.putrequest("GET", (own if name is None else name) + path,
                              skip_host="Host" in headers)  # fmt: skip
        for header, value in headers.items():
            connection.putheader(header, value)
        connection.endheaders()
        return connection.getresponse()

    def ask(self, path: str) -> Any:
        answer = self.get(path)
        assert answer.status == 200, answer.read()
        return json.loads(answer.read())

    def numbers(self, path: str) -> npt.NDArray[np.float32]:
        answer = self.get(path)
        assert answer.status == 200, answer.read()
        shape = map(int, answer.headers["X-Shape"].split(","))
        return np.frombuffer(answer.read(), "<f4").reshape(tuple(shape))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    path = write_blocks(
        tmp_path / "model.gguf",
        {**{name: ("F32", values) for name, values in TENSORS.items()},
         "unreadable": ("Q8_K", random_rows("Q8_K", 2, 1))},
    )  # fmt: skip
    others = {
        **TENSORS,
        "blk.0.ffn_up.weight": OTHER,
        "blk.0.odd.weight": np.ones((3, 3), np.float32),
    }
    del others["blk.0.lone.weight"]
    original = write_blocks(
        tmp_path / "original.gguf", {name: ("F32", values) for name, values in others.items()}
    )
    sources = [(model, WeightReader(model)) for model in map(load_model_file, (path, original))]
    server = WeightsServer(Tensors(*sources, threads=2))
    started = threading.Event()
    thread = threading.Thread(target=server.run, args=(started.set,), daemon=True)
    thread.start()
    assert started.wait(PATIENCE_S)
    yield Served(path, server)
    server.stop()
    thread.join()


def test_the_listing_has_every_tensor(served: Served) -> None:
    listing = served.ask("tensors")
    assert listing["models"] == ["model.gguf", "original.gguf"]
    assert [of["name"] for of in listing["tensors"]] == [*TENSORS, "unreadable"]
    first = listing["tensors"][0]
    assert (first["layer"], first["role"], first["ne"]) == (0, "ffn_up", [512, 300])
    assert "Q8_K" in listing["tensors"][-1]["trouble"]


def test_tiles_are_the_weights_of_both_files_and_their_difference(served: Served) -> None:
    for which, values in ((0, MATRIX), (1, OTHER), (2, MATRIX - OTHER)):
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            tile = served.numbers(f"tile/largest/0/{which}/0/{row}/{column}")
            wanted = values[row * 256 : row * 256 + 256, column * 256 : column * 256 + 256]
            assert np.array_equal(tile, wanted)
        coarse = served.numbers(f"tile/rms/0/{which}/1/0/0")
        assert coarse.shape == (150, 256)
        assert coarse[3, 4] == pytest.approx(np.sqrt(np.mean(values[6:8, 8:10] ** 2)), rel=1e-5)
        assert len(served.ask(f"limits/largest/0/{which}")) == 2


def test_a_tensor_without_a_partner_is_shown_alone_and_says_why(served: Served) -> None:
    assert len(served.ask("tensor/0")["matrices"]) == 2
    for number, why in ((2, "another shape: [3, 3]"), (3, "has no tensor of this name")):
        tensor = served.ask(f"tensor/{number}")
        assert len(tensor["matrices"]) == 1
        assert why in tensor["troubles"][0]
        assert served.get(f"tile/largest/{number}/1/0/0/0").status == 404
        assert served.get(f"tile/largest/{number}/0/0/0/0").status == 200
    assert served.ask("tensor/4")["troubles"]
    assert served.get("tile/largest/4/0/0/0/0").status == 404


def test_a_vector_is_served_whole(served: Served) -> None:
    answer = served.get("vector/1/0")
    assert answer.headers["X-Step"] == "1"
    assert np.array_equal(np.frombuffer(answer.read(), "<f4"), TENSORS["output_norm.weight"])
    assert served.get("vector/0/0").status == 404


def test_figures_arrive_in_the_order_of_the_file(served: Served) -> None:
    end = time.monotonic() + PATIENCE_S
    while not served.ask("figures")["over"]:
        assert time.monotonic() < end
    figures = served.ask("figures")["figures"]
    assert [of["tensor"] for of in figures] == [0, 1, 2, 3], "but not those of the unreadable one"
    assert figures[0]["std"] == pytest.approx(MATRIX.std(), rel=1e-6)
    assert figures[3]["non_finite"] == 2
    assert served.ask("figures?begin=3")["figures"] == figures[3:]


@pytest.mark.parametrize(
    "path",
    ["tile/largest/0/0/0/2/0", "tile/largest/0/0/0/0/2", "tile/largest/0/0/9/0/0", "tensor/5",
     "tile/largest/0/3/0/0/0", "tile/worst/0/0/0/0/0", "tile/largest/5/0/0/0/0", "vector/5/0",
     "limits/worst/0/0", "limits/rms/9/0", "tile/largest/-1/0/0/0/0", "../etc/passwd", "x"],
)  # fmt: skip
def test_what_is_not_there_is_missing(path: str, served: Served) -> None:
    assert served.get(path).status == 404


@pytest.mark.parametrize("attempt", range(4))
def test_a_file_that_became_shorter_is_one_line(served: Served, attempt: int) -> None:
    """Also while its tensors are measured: mapping the file would end the process."""
    time.sleep(attempt * 0.005)
    with served.path.open("r+b") as file:
        file.truncate(2000)
    answer = served.get("tile/largest/0/0/0/0/0")
    assert answer.status == 409
    assert answer.read().decode() == f"{served.path} became shorter while it was read"


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Origin": "http://evil.example"},
     {"Origin": "null"}],
)  # fmt: skip
def test_other_pages_and_names_get_nothing(served: Served, headers: dict[str, str]) -> None:
    for path in ("", "tensors", "tile/largest/0/0/0/0/0"):
        assert served.get(path, **headers).status == 421


@pytest.mark.parametrize("path", [f"tensor/{'9' * 5000}", f"figures?begin={'9' * 5000}"])
def test_a_number_of_thousands_of_digits_is_refused(path: str, served: Served) -> None:
    assert served.get(path).status == 414


def test_without_its_name_nothing_is_served(served: Served) -> None:
    for path in ("/", "/tensors", "/weights.js", "/tile/largest/0/0/0/0/0"):
        assert served.get(path, name="").status == 404


def test_the_page_and_its_parts_are_served(served: Served) -> None:
    scripts = ("main", "weights", "panes", "colors", "figures", "common", "uplot")
    for path in ("", "weights.css", "uplot.css", *(f"{name}.js" for name in scripts)):
        answer = served.get(path)
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_another_page_can_mount_the_routes(served: Served) -> None:
    model = load_model_file(served.path)
    tensors = Tensors((model, WeightReader(model)))
    app = Starlette(routes=[Mount("/weights", routes=weight_routes(tensors))])

    async def ask(path: str) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        await app(scope, None, send)  # type: ignore[arg-type]
        return sent[0]["status"], sent[1]["body"]

    status, body = asyncio.run(ask("/weights/tensors"))
    assert (status, json.loads(body)["models"]) == (200, ["model.gguf"])
    assert asyncio.run(ask("/weights/weights.js"))[0] == 200


def test_a_port_in_use_is_named(served: Served) -> None:
    model = load_model_file(served.path)
    tensors = Tensors((model, WeightReader(model)))
    with pytest.raises(UsageError, match=r"--port \d+: Address already in use"):
        WeightsServer(tensors, served.server.port)

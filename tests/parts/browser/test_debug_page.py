"""The page of `instr debug --page` in Chromium: what it shows of a stop, what its buttons do."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.model.file import load_model_file
from tests.kit.browser_kit import Browser, Debugged, browser, debugged
from tests.kit.dap_kit import is_whole
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import run_python
from tests.kit.tiny_models import write_speaker

pytestmark = pytest.mark.native

PROMPT = "Once upon a time"
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def page() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def stopped(page: Browser, act: Callable[[], object], before: str | None = None) -> str:
    """Where the model is at the stop that an action leads to, once everything is drawn."""
    before = before or page.read("document.body.dataset.visit ?? ''")
    act()
    page.wait(
        "document.body.dataset.state === 'stopped' && "
        f"(document.body.dataset.visit ?? '') > '' && document.body.dataset.visit !== {before!r}"
    )
    return page.text("#where")


def opened(page: Browser, run: Debugged) -> str:
    """Where the model is when the page is opened."""
    return stopped(page, lambda: page.do("goto", run.address), "none")


@contextmanager
def at_a_stop(page: Browser, folder: Path, *words: object) -> Iterator[str]:
    """Where the model is when the page is opened; at the end, the run is quit."""
    with debugged(folder, *words) as run:
        yield opened(page, run)
        page.click("#quit")
        run.ended()


def figures(page: Browser) -> dict[str, str]:
    found: dict[str, str] = page.read(
        "Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
        ".map((of) => [of.dataset.figure, of.dataset.value]))"
    )
    return found


def shares(page: Browser, of: str) -> list[tuple[int, float]]:
    """Tokens and their probabilities, in the order in which they are shown."""
    found = page.read(
        f"[...document.querySelectorAll('{of} [data-share]')]"
        ".map((one) => [+one.dataset.token, +one.dataset.share])"
    )
    return [(token, share) for token, share in found]


READ = """
import json, sys
import numpy as np
import llama_cpp, llamacpp_instr
from llamacpp_instr.debugger.attention import attention
from llamacpp_instr.debugger.tensors import figures_of
from llamacpp_instr.debugger.residual import Lens, most_probable

model, prompt, log = sys.argv[1:]
found = {}
with llamacpp_instr.debug(log) as d:
    lens = Lens()
    d.debugger.followers.append(lens)
    llm = llama_cpp.Llama(model, n_ctx=512, flash_attn=True, verbose=False)
    tokens = llm.tokenize(prompt.encode())
    for name in ("op=FLASH_ATTN_EXT layer=1", "l_out-1", "result_output"):
        d.add(name)
    for stop in d.run(lambda: llm.eval(tokens)):
        name = stop.node.name
        values = stop.values()
        if stop.node.op == "FLASH_ATTN_EXT":
            found["attention"] = attention(stop).weights.tolist()
            continue
        found[name] = values.tolist()
        found[name + " figures"] = figures_of(values)
        found[name + " lens"] = [[g.layer, g.top(5)] for g in lens.look(stop)]
        if name == "result_output":
            found["next"] = most_probable(np.atleast_2d(values)[-1], 10)
    lens.close()
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def read_by_python(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Python reads at the same stops, in a process of its own."""
    log = tmp_path_factory.mktemp("read") / "read.log"
    done = run_python(READ, DEMO, PROMPT, log, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_it_shows_of_a_stop_is_what_python_reads_there(
    page: Browser, tmp_path: Path, read_by_python: dict[str, Any]
) -> None:
    breaks = ("-b", "op=FLASH_ATTN_EXT layer=1 step=0", "-b", "l_out-1 step=0")
    with at_a_stop(page, tmp_path, "demo", "-p", PROMPT, "-n", 2, *breaks) as where:
        assert where.endswith("layer 1, attention · step 0: 5 tokens")
        last = [float(of) for of in page.read(
            "[...document.querySelectorAll('#head-values li')].map((of) => of.dataset.value)"
        )]  # fmt: skip
        weights = np.array(read_by_python["attention"])
        assert last == pytest.approx(np.sort(weights[0, -1])[::-1][: len(last)], abs=1e-6)
        assert page.texts("#head-columns span") == ["<s>", "␣Once", "␣upon", "␣a", "␣time"]
        assert stopped(page, lambda: page.click("#continue")).startswith("l_out-1 · layer 1")
        known = read_by_python["l_out-1 figures"]
        assert {name: float(of) for name, of in figures(page).items()} == known
        page.do("fill", "#slice", text="[2:5, 3:7]")
        page.wait("document.querySelectorAll('#values [data-value]').length === 12")
        shown = page.read(
            "[...document.querySelectorAll('#values [data-value]')].map((of) => +of.dataset.value)"
        )
        assert shown == np.array(read_by_python["l_out-1"])[2:5, 3:7].reshape(-1).tolist()
        assert shares(page, "#lens") == [
            (token, share) for _, best in reversed(read_by_python["l_out-1 lens"])
            for token, share in best
        ]  # fmt: skip
        stopped(page, lambda: page.click("#to-logits"))
        assert shares(page, "#next") == [tuple(one) for one in read_by_python["next"]]


def test_a_click_in_the_listing_is_a_breakpoint_and_steps_end_where_they_say(
    page: Browser, tmp_path: Path
) -> None:
    with at_a_stop(page, tmp_path, "demo", "-p", PROMPT, "-n", 4) as where:
        assert where.startswith("embd · embedding")
        page.read(
            "[...document.querySelectorAll('.line')].find((line) => line.querySelector('.name')"
            "?.textContent === 'ffn_inp-0').querySelector('.point').click()"
        )
        page.wait("document.querySelector('#breaks code')?.textContent.startsWith('ffn_inp-0')")
        assert page.read("document.querySelectorAll('#listing .line').length") < 60, "of 111"
        assert stopped(page, lambda: page.click("#continue")).startswith("ffn_inp-0 ")
        assert "breakpoint" in page.text("#state")
        page.do("fill", "#breaks input", text="absmax < 0")
        assert "layer 0, feed-forward" in stopped(page, lambda: page.click("[data-step=layer]"))
        assert stopped(page, lambda: page.click("[data-step=op]")).startswith("norm-1 ")
        assert "layer 1, norm" in stopped(page, lambda: page.click("[data-step=block]"))
        cell = "#map button[data-layer='2'][data-block='feed-forward']"
        assert "layer 2, feed-forward" in stopped(page, lambda: page.click(cell))
        assert stopped(page, lambda: page.click("[data-step=decode]")).startswith("result_output")
        assert "step 1" in stopped(page, lambda: page.click("[data-step=op]"))
        page.click("#continue")  # the breakpoint's condition never holds
        page.wait("document.body.dataset.state === 'over'")


def test_zeros_change_the_next_token_and_both_texts_are_compared(
    page: Browser, tmp_path: Path, read_by_python: dict[str, Any]
) -> None:
    with debugged(tmp_path, "demo", "-p", PROMPT, "-n", 4, "-b", "ffn_out-1 step=0") as run:
        opened(page, run)
        page.click("[data-edit=zero]")
        page.wait("document.querySelector('#changes code')?.textContent === 'zero'")
        page.wait("document.querySelector('[data-figure=absmax]').dataset.value === '0'")
        stopped(page, lambda: page.click("#to-logits"))
        after = shares(page, "#next")
        assert after != [tuple(one) for one in read_by_python["next"]]
        assert sum(share for _, share in after) <= 1
        page.click("#continue")
        page.wait("!document.getElementById('comparison').hidden")
        rows = page.read(
            "[...document.querySelectorAll('#compared tr')].slice(1)"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        assert len(rows) == 4
        logits_by, divergence = map(float, rows[0][3:])
        assert logits_by > 0
        assert divergence > 0
        page.click("#quit")
        assert "running again without the changes" in run.ended()
    notes = [
        line for line in (tmp_path / "debug.log").read_text().splitlines() if "instr.change" in line
    ]
    assert len(notes) == 1


def test_a_nan_is_found_shown_and_looked_at(page: Browser, tmp_path: Path) -> None:
    with at_a_stop(page, tmp_path, "demo", "-p", PROMPT, "-n", 4, "-b", "l_out-1 step=0"):
        page.do("fill", "#slice", text="[2, 7]")
        page.wait("document.querySelector('#change-what').textContent.includes('[2, 7]')")
        page.do("fill", "#edit-set", text="nan")
        page.click("[data-edit=set]")
        page.wait("document.querySelector('#values [data-value=null]') !== null")
        page.click("#on-nan")
        where = stopped(page, lambda: page.click("#continue"))
        assert where.startswith("norm-2 · layer 2, norm")
        assert "NaN" in page.text("#state")
        assert figures(page)["nan"] == "256"  # of one token
        page.click("#sources button")
        page.wait("document.querySelector('#tensor-name').textContent === 'l_out-1'")
        assert figures(page)["nan"] == "1"


def test_an_outlier_does_not_hide_the_other_values(page: Browser, tmp_path: Path) -> None:
    with at_a_stop(page, tmp_path, "demo", "-p", PROMPT, "-n", 1, "-b", "ffn_out-1 step=0"):
        blue = page.read("""import("./tensor.js").then(async ({TensorView}) => {
            const cells = [[0, 1, 2, 3, 4, 5, 6, 22469]];
            const heatMap = {cells, rowEdges: [0, 1], columnEdges: [0, 1, 2, 3, 4, 5, 6, 7, 8]};
            const histogram = {counts: [8], edges: [0, 22469]};
            const figures = {nan: 0, inf: 0};
            const seen = {name: "x", type: "f32[1×8]", figures, histogram, heatMap};
            const view = new TensorView({request: async () => seen}, () => {});
            await view.show(null);
            const {canvas} = view, context = canvas.getContext("2d");
            const {data} = context.getImageData(0, canvas.height / 2, canvas.width, 1);
            return cells[0].map((_, i) => data[4 * Math.floor((i + 0.5) * canvas.width / 8) + 2]);
        })""")
        steps = [a - b for a, b in itertools.pairwise(blue)]
        assert min(steps) > 0.5 * max(steps), blue


def test_a_page_that_is_loaded_again_shows_the_same_stop(page: Browser, tmp_path: Path) -> None:
    shown = ("#where", "#state", "#tokens", "#changes", "#breaks code", "#figures", "#lens")
    with debugged(tmp_path, "demo", "-p", PROMPT, "-n", 4, "-b", "l_out-2 step=1") as run:
        opened(page, run)
        page.click("[data-edit=scale]")
        page.wait("document.querySelector('#changes code')")
        page.do("fill", "#break-text", text="ffn_oot-1")
        page.wait("document.querySelector('#breaks .problem')")
        before = [page.text(selector) for selector in shown]
        opened(page, run)
        page.wait("document.querySelector('#breaks .problem')")
        assert [page.text(selector) for selector in shown] == before
        assert "the nearest are ffn_out-1" in page.text("#breaks .problem")
        page.click("#quit")
        run.ended()


def test_quitting_at_a_stop_and_an_interrupt_leave_a_whole_log(
    page: Browser, tmp_path: Path
) -> None:
    with debugged(tmp_path, "demo", "-p", PROMPT, "--log", "quit.log") as run:
        opened(page, run)
        page.click("#quit")
        page.wait("document.body.dataset.state === 'over'")
        assert run.ended().endswith("log: quit.log\n")
    for number in (signal.SIGINT, signal.SIGTERM):
        with debugged(tmp_path, "demo", "-p", PROMPT, "--log", f"{number.name}.log") as run:
            run.process.send_signal(number)
            run.ended()
    for name in ("quit", "SIGINT", "SIGTERM"):
        assert is_whole(tmp_path / f"{name}.log")


APP = """
import sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
for _ in range(2):
    try:
        print(model("Once upon a time", max_tokens=4, temperature=0)["choices"][0]["text"])
    except RuntimeError:
        print("ended")  # like a server, which goes on
if "stay" in sys.argv:
    import time
    time.sleep(1000)
"""


def test_a_program_is_stopped_too(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    with at_a_stop(page, tmp_path, "-b", "l_out-3 step=1", "--", "app.py", DEMO) as where:
        assert "layer 3" in where
        assert page.texts("#tokens .now") != []
        page.click("#continue")
        page.wait("document.body.dataset.state === 'over'")
    with at_a_stop(page, tmp_path, "--log", "stays.log", "--", "app.py", DEMO, "stay"):
        pass
    for name in ("debug.log", "stays.log"):
        assert is_whole(tmp_path / name)


def test_what_a_model_or_a_user_names_stays_text(page: Browser, tmp_path: Path) -> None:
    model = write_speaker(tmp_path / f"{HOSTILE}.gguf", [f"{HOSTILE}{i}" for i in range(40)])
    words = (model, "-p", "aaa", "-n", 3, "-b", "l_out-1 step=1")
    with at_a_stop(page, tmp_path, *words):
        page.do("fill", "#break-text", text=HOSTILE)
        page.wait("document.querySelectorAll('#breaks code').length === 2")
        page.do("fill", "#slice", text=f"[{HOSTILE}]")
        page.wait("document.querySelector('#tensor-problem').textContent.includes('<img')")
        assert HOSTILE in page.text("#tokens")
        assert HOSTILE in page.text("#lens")
        assert page.texts("#breaks code")[1] == HOSTILE
        assert page.read("document.images.length") == 0


def show_weights(page: Browser) -> None:
    page.click("#tab-weights")
    page.wait("document.querySelector('#weights .state')?.textContent.endsWith(' tensors')")
    page.wait("document.querySelector('#weights .tensor').ariaBusy !== 'true'")


def test_the_weights_are_a_tab_and_the_run_goes_on_after_it(page: Browser, tmp_path: Path) -> None:
    weights = load_model_file(DEMO).weights
    with at_a_stop(page, tmp_path, "demo", "-p", PROMPT, "-b", "ffn_out-1") as where:
        show_weights(page)
        assert page.text("#weights .state") == f"{len(weights)} tensors"
        assert page.text("#weights h1") == "demo.gguf"
        assert page.text("#weights .name") in {weight.name for weight in weights}
        assert page.read("document.querySelector('#weights canvas').width") > 0
        assert not page.read("document.querySelector('main').checkVisibility()")
        page.click("#tab-run")
        assert page.text("#where") == where
        stopped(page, lambda: page.click("[data-step=op]"))


def test_a_program_has_no_tab_of_weights(page: Browser, tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text("import sys, llama_cpp\nllama_cpp.Llama(sys.argv[1], verbose=False)('a')\n")
    with at_a_stop(page, tmp_path, "--", program, DEMO):
        assert not page.read("document.querySelector('#tabs').checkVisibility()")


def test_it_fits_every_screen(page: Browser, tmp_path: Path) -> None:
    def fits(width: int) -> bool:
        page.do("size", [width, 900])
        return page.read("document.documentElement.scrollWidth - innerWidth") <= 0

    with at_a_stop(page, tmp_path, "demo", "-p", PROMPT, "-b", "op=FLASH_ATTN_EXT layer=1"):
        assert all(map(fits, (400, 1280, 1600)))
        show_weights(page)
        assert all(map(fits, (400, 1280, 1600)))

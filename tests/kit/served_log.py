"""A made session of requests: with and without marks and tokens, steps that fail, warm-ups."""

from __future__ import annotations

from random import Random

from llamacpp_instr.log import schema as s
from tests.kit.made_log import make_log


def served(random: Random) -> list[s.Event]:
    """Two contexts serve three sequences each. A log has the tokens of the first. Some requests
    have marks, which may end during the next one's first step; some steps fail or are warm-ups."""
    made = make_log(lambda low, _: low, n_contexts=2, level="minimal")
    events = [e for e in made if isinstance(e, s.SessionStart | s.Model | s.Tensor | s.Context)]
    now = max(event.t for event in events) + 1
    marks: dict[tuple[int, int], int] = {}
    late: list[tuple[int, int]] = []
    cells = dict.fromkeys([(ctx, seq) for ctx in (0, 1) for seq in range(3)], 0)
    for step in range(600):
        ctx, warm_up = step % 2, step in (6, 7, 50)
        parts = []
        for seq in random.sample(range(3), random.randint(1, 3)):
            tokens, pos = 1, cells[ctx, seq]
            if pos == 0 or random.random() < 0.1:
                tokens, pos = random.randint(2, 9), random.choice([0, pos // 2, pos])
                if (ctx, seq) in marks:
                    late.append((marks.pop((ctx, seq)), seq))
                if random.random() < 0.6:
                    now += 10
                    marks[ctx, seq] = 1000 + step * 4 + seq
                    events.append(
                        s.Mark(t=now, mark=marks[ctx, seq], name=f"of {ctx}", phase="begin")
                    )
            parts.append((seq, pos, tokens, 1))
            cells[ctx, seq] = pos + tokens
        if warm_up:
            events.append(s.Mark(t=now + 1, mark=step, name="warm-up", phase="begin"))
        seqs, positions, counts, outputs = (list(column) for column in zip(*parts, strict=True))
        now += 100
        events.append(
            s.StepBegin(
                t=now, step=step, ctx=ctx, kind="decode", phase="decode", n_tokens=sum(counts),
                n_outputs=len(parts), n_seqs=len(parts), pos=min(positions), seq=seqs,
                seq_pos=positions, seq_tokens=counts, seq_outputs=outputs,
            )
        )  # fmt: skip
        for mark, seq in late:
            now += 5
            events.append(s.Mark(t=now, mark=mark, name="", phase="end", seq=seq))
        late.clear()
        now += 200
        events.append(
            s.StepEnd(
                t=now, step=step, status=int(random.random() < 0.05), n_ubatch=1, n_reused=0,
                prepare=0, readback=0,
            )
        )  # fmt: skip
        for i, seq in enumerate(seqs if ctx == 0 else []):
            events.append(
                s.Token(t=now + i, ctx=0, step=step, seq=seq, index=i, id=1, text="x", dur=1)
            )
        now += 10
        if warm_up:
            events.append(s.Mark(t=now, mark=step, name="warm-up", phase="end"))
    return events

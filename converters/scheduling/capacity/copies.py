"""The copies that llama-server keeps of prompts which lost their slots: `--cache-ram`."""

from __future__ import annotations

from llamacpp_instr.converters.scheduling.capacity.workload import Text, common

WORTH = 0.25
"""share of a copy that a prompt must begin with to take it: server-task.cpp:1812"""


class Copies:
    """The copies of prompts in RAM, grouped by their first two pieces: to find what a text has in
    common with them, few have to be looked at."""

    def __init__(self, bytes_of_token: float, limit: int) -> None:
        self._most = limit / bytes_of_token if bytes_of_token else 0.0
        self._texts: dict[int, tuple[Text, int]] = {}
        self._groups: dict[int, dict[int | None, list[int]]] = {}
        self._tokens = self._next = 0

    def save(self, text: Text, tokens: int) -> bool:
        """Copies what a slot has; returns whether that was needed."""
        if not text or tokens > self._most:
            return False
        groups = self._groups.get(text[0][0], {})
        # only these can have all of the text, or the text all of them
        near = groups if len(text) == 1 else (text[1][0], None)
        for i in [i for of in near for i in groups.get(of, ())]:
            of_copy, length = self._texts[i]
            n = common(of_copy, text)
            if n == tokens:
                return False
            if n == length:
                self._forget(i)
        while self._texts and self._tokens + tokens > self._most:
            self._forget(next(iter(self._texts)))
        self._texts[self._next] = text, tokens
        group = self._groups.setdefault(text[0][0], {}).setdefault(_second(text), [])
        group.append(self._next)
        self._next += 1
        self._tokens += tokens
        return True

    def take(self, prompt: Text, text: Text, tokens: int) -> tuple[Text, int] | None:
        """The copy that is better for a prompt than what its slot has, taken out."""
        n = common(text, prompt)
        keep, most, best = (n / tokens if tokens else -1.0), n, -1
        groups = self._groups.get(prompt[0][0], {})
        near = groups if prompt[0][1] > n else (_second(prompt),)
        for i in sorted(i for of in near for i in groups.get(of, ())):
            of_copy, length = self._texts[i]
            n = common(of_copy, prompt)
            share = n / length
            if share >= WORTH and keep < share and most < n:
                keep, most, best = share, n, i
        if best < 0:
            return None
        found = self._texts[best]
        self._forget(best)
        return found

    def _forget(self, i: int) -> None:
        text, tokens = self._texts.pop(i)
        groups = self._groups[text[0][0]]
        groups[_second(text)].remove(i)
        if not groups[_second(text)]:
            del groups[_second(text)]
        self._tokens -= tokens


def _second(text: Text) -> int | None:
    return text[1][0] if len(text) > 1 else None

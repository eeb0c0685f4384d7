"""Live view of `terrace demo`: two bars, and a few images whose answers appear as they arrive."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from models.data import ImageSet
from models.hierarchy import Hierarchy
from terrace.console import Column, Listing, milliseconds, tier_text
from tierkit.client import CoarseAnswer, CoarseResults, Event, FallbackResults, FineAnswer, FineResults, ImageResult
from tierkit.types import Tier

__all__ = ["DemoScreen"]

_EXAMPLES = 8
_BAR_WIDTH = (8, 40)
_BESIDE_BAR = 24
_LABEL_WIDTH = (12, 31)
"""Widths of a short and of the longest superclass name with its mark, so that the columns do not move."""
_FINE_WIDTH = 15
_OTHER_COLUMNS = 57


class DemoScreen:
    """A picture of a job under way; `take` moves it forward.

    Args:
        sample: the images of the job, with their true classes.
        hierarchy: of the sample.
        known: True if the networks answer the classes of the sample, so that answers can be right or wrong.
        names: of the first and the later answers.
        ready_s: seconds that the fleet took to come up.
    """

    def __init__(
        self,
        sample: ImageSet,
        hierarchy: Hierarchy,
        *,
        known: bool = True,
        names: tuple[str, str] = ("coarse", "fine"),
        ready_s: float,
    ) -> None:
        self._total = len(sample)
        self._hierarchy = hierarchy
        self._known = known
        self._names = names
        self._truth = [int(label) for label in sample.fine] if sample.fine is not None else []
        self._ready_s = ready_s
        # Spread over the job, so that the tasks of all nodes show up.
        self._examples = sorted({round(index * (self._total - 1) / (_EXAMPLES - 1)) for index in range(_EXAMPLES)})
        self._coarse: dict[int, CoarseAnswer] = {}
        self._fine: dict[int, FineAnswer] = {}
        self._standing: set[int] = set()

    def take(self, event: Event) -> None:
        """Note what has arrived."""
        match event:
            case CoarseResults(results=results) | FineResults(results=results):
                for result in results:
                    self._note(result)
            case FallbackResults(results=results):
                self._standing |= {result.index for result in results}

    def _note(self, result: ImageResult) -> None:
        if result.coarse is not None:
            self._coarse[result.index] = result.coarse
        if result.fine is not None:
            self._fine[result.index] = result.fine

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"fleet ready in {self._ready_s:.1f} s, {self._total:,} images are on their way\n", style="dim")
        yield self._bars(max(_BAR_WIDTH[0], min(_BAR_WIDTH[1], options.max_width - _BESIDE_BAR)))
        label_width = max(_LABEL_WIDTH[0], min(_LABEL_WIDTH[1], options.max_width - _OTHER_COLUMNS))
        yield Padding(self._answers(label_width), (1, 0), expand=False)

    def _judged(self, answer: CoarseAnswer | FineAnswer, truth: int) -> Text:
        if not self._known:
            return Text(_words(answer.label))
        right = answer.index == truth
        return Text.assemble(
            ("✓ ", "green") if right else ("✗ ", "red"), (_words(answer.label), "" if right else "dim")
        )

    def _missing(self, index: int) -> Text:
        return Text(f"{self._names[0]} stands" if index in self._standing else "…", style="dim")

    def _bars(self, width: int) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        lower, upper = self._names
        for name, style, answers in ((lower, "cyan", self._coarse), (upper, "magenta", self._fine)):
            bar = ProgressBar(
                total=self._total, completed=len(answers), width=width, complete_style=style, finished_style=style
            )
            table.add_row(name, bar, Text(f"{len(answers):,}/{self._total:,}", style="dim"))
        return table

    def _answers(self, label_width: int) -> RenderableType:
        table = Listing(
            Column(title="an image of", rank=1, max_width=_FINE_WIDTH),
            Column(title=self._names[0], min_width=label_width, max_width=label_width),
            Column(title="after", rank=4, right=True),
            Column(title=self._names[1], min_width=_FINE_WIDTH, max_width=_FINE_WIDTH),
            Column(title="after", rank=3, right=True),
            Column(title="by", rank=2),
        )
        for index in self._examples:
            truth = self._truth[index]
            coarse, fine = self._coarse.get(index), self._fine.get(index)
            table.add_row(
                _words(self._hierarchy.fine[truth]),
                self._judged(coarse, self._hierarchy.parent[truth]) if coarse else Text("…", style="dim"),
                milliseconds(coarse.ms) if coarse else "",
                self._judged(fine, truth) if fine else self._missing(index),
                milliseconds(fine.ms) if fine else "",
                tier_text(fine.node, fine.tier) if fine else tier_text(coarse.node if coarse else "", Tier.END),
            )
        return table


def _words(label: str) -> str:
    return label.replace("_", " ")

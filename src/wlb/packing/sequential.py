"""Original packing (plain-4D): concatenate documents in order of arrival and cut at the context window.

Most training stacks pack this way, and it is the baseline of WLB-LLM (section 2.1). A document is cut where the window
ends; attention does not cross the cut. Pieces of an overlong document that meet inside a micro-batch become one segment
again, so documents are cut only between micro-batches.
"""

import math
from itertools import chain, islice

from wlb.documents.segments import Segment
from wlb.packing.packer import Packer, rows_of, segments_of
from wlb.packing.plan import MicroBatch, StepPlan
from wlb.workload.phases import segment_seconds


class SequentialPacker(Packer):
    """Micro-batches of ``micro_batch_windows`` windows of exactly ``context_window`` tokens.

    The last step of an epoch is divided evenly.
    """

    name = "sequential"
    _cuts_documents = True

    def _tokens_wanted(self) -> int:
        return self.global_batch_tokens

    def _next_steps(self) -> list[StepPlan]:
        return [self._cut([self.context_window] * self.global_batch)]

    def last_steps(self) -> list[StepPlan]:
        share, rest = divmod(self._arrived_tokens, self.global_batch)
        return [self._cut([share + (index < rest) for index in range(self.global_batch)])]

    def _cut(self, sizes: list[int]) -> StepPlan:
        """One step of windows of exactly ``sizes`` tokens, taken from the front of the arrivals."""
        segments = segments_of(self._take(sum(sizes)))[::-1]
        pieces: list[list[Segment]] = []
        for room in sizes:
            piece: list[Segment] = []
            while room:
                document, start, length = segment = segments.pop()
                if length > room:
                    segments.append(Segment(document, start + room, length - room))
                    segment = Segment(document, start, room)
                room -= segment[2]
                if start and piece and piece[-1].document == document and piece[-1].start + piece[-1].length == start:
                    piece[-1] = piece[-1]._replace(length=piece[-1].length + segment[2])
                else:
                    piece.append(segment)
            pieces.append(piece)
        self._put_back(rows_of(segments))  # at most one: what the cut left of the last document
        together = self.options.micro_batch_windows
        pieces = [list(chain(*pieces[first : first + together])) for first in range(0, len(pieces), together)]
        seconds = iter(segment_seconds(self.workload, [segment for piece in pieces for segment in piece]).tolist())
        return self._emit([[MicroBatch(tuple(piece), math.fsum(islice(seconds, len(piece)))) for piece in pieces]])

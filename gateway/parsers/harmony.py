"""Parse answers of gpt-oss: messages, each of a header with a channel, a recipient and a type, and a body. Only control
tokens count as markers, since a model may write about them in its text."""

import re
from collections.abc import Mapping

from gateway.parsers.answer_parser import AnswerParser, spell
from gateway.parsers.reading import Cut, Malformed, Markers, Reading

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s]+)")
_FUNCTIONS = "functions."


class HarmonyParser(AnswerParser):
    """Parse analysis as reasoning, a message to a function as a call, and a message to the user as content."""

    def __init__(self, spellings: Mapping[str, str], has_tools: bool, continues: bool):
        """`has_tools`: messages to functions are calls; otherwise they are dropped. `continues`: the answer begins
        within a message to the user, whose header is in the prompt."""
        self._has_tools, self._continues = has_tools, continues
        self._start, self._channel, self._constrain, self._message, *ends = (spell(m, spellings) for m in MARKERS)
        self._ends = tuple(ends)
        self._kinds = set[str]()  # of the messages so far that had text
        super().__init__(spellings)

    def _run(self) -> Reading:
        source = self._source
        try:
            if self._continues:
                yield from self._text("content")
            while True:
                head, end = yield from source.until(self._message, self._start, *self._ends)
                if end == self._message:
                    yield from self._body(head)
                source.forget()
        except Cut:
            rest = source.text[source.at :]
            if source.position == 0 and self._channel not in rest:  # without a header: the grammar has the text alone
                self._emit("content", rest)

    def _body(self, head: str) -> Reading:
        channel = head.rpartition(self._channel)[2].replace(self._constrain, " ").split()
        recipients = _RECIPIENT.findall(head.replace(self._channel, " ").replace(self._constrain, " "))
        name = channel[0] if channel and self._channel in head else ""
        to = next((each for each in recipients if each.startswith(_FUNCTIONS)), "").removeprefix(_FUNCTIONS)
        if to:
            yield from self._call_or_text(to) if self._has_tools else self._text("")
        elif name == "analysis":
            begin = self._source.position
            try:
                yield from self._text("reasoning")
            finally:
                self.reasoning_spans.append((begin, self._source.position))
        elif not recipients:  # a message to another tool is dropped
            yield from self._text("content")

    def _text(self, kind: str) -> Reading:
        """Read a message's text, which begins on a new line after another one of its kind. `kind`: content, reasoning,
        or "" for a call of a request without tools, which is dropped. Raises Cut."""
        source, markers = self._source, Markers((*self._ends, self._start))
        line_end, has_text = "\n" if kind in self._kinds else "", False
        while not (found := markers.find(source.text, source.at)):
            end = len(source.text) if source.has_ended else len(source.text) - markers.num_held(source.text, source.at)
            if end > source.at:
                self._emit(kind, line_end + source.text[source.at : end])
                line_end, has_text = "", True
            source.at = end
            source.forget()
            if source.has_ended:
                raise Cut
            yield
        if found.start() > source.at:
            self._emit(kind, line_end + source.text[source.at : found.start()])
            has_text = True
        if has_text:
            self._kinds.add(kind)
        source.at = found.start()  # the next header is searched from this end on

    def _emit(self, kind: str, text: str) -> None:
        if kind == "content":
            self._add_content(text)
        elif kind == "reasoning":
            self._think(text)

    def _call_or_text(self, name: str) -> Reading:
        """Read a call; if it is malformed, its body is content from the beginning. Raises Cut."""
        begin = self._source.at
        try:
            yield from self._call(name)
        except (Malformed, Cut) as error:
            if isinstance(error, Cut) and not self._is_whole:
                raise
            self._source.at = begin
            yield from self._text("content")

    def _call(self, name: str) -> Reading:
        """Read a call; one with an empty body has no arguments. Raises Malformed, Cut."""
        source = self._source
        has_arguments = (yield from source.peek()) == "{"
        if has_arguments:
            self._sink.begin(name)
            yield from source.json_text(self._sink.add)
        # At the end of the answer there is no marker, as its stop token is not in the text.
        if not (yield from source.accept(*self._ends, self._start)) and (yield from source.peek()):
            raise Malformed
        if not has_arguments:
            self._sink.begin(name)
            self._sink.add("{}")
        self._sink.end()

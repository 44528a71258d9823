"""The messages of gpt-oss: each a header with a channel, a recipient and a type, then a body. Its markers are control
tokens alone: models write about them."""

import re
from collections.abc import Mapping

from gateway.parsers.answer_parser import AnswerParser, spell
from gateway.parsers.reading import Cut, Malformed, Markers, Reading

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s]+)")
_FUNCTIONS = "functions."


class HarmonyParser(AnswerParser):
    """Analysis is reasoning, a message to a function is a call, what is meant for the user is content."""

    def __init__(self, spellings: Mapping[str, str], has_tools: bool, continues: bool):
        """`has_tools`: messages to functions are calls; they are left out otherwise. `continues`: the answer begins
        within a message for the user, whose header is in the prompt."""
        self._has_tools, self._continues = has_tools, continues
        self._start, self._channel, self._constrain, self._message, *ends = (spell(m, spellings) for m in MARKERS)
        self._ends = tuple(ends)
        self._kinds = set[str]()  # of the messages that had text
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
            if source.position == 0 and self._channel not in rest:  # no header: a grammar spelled the text alone
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
        elif not recipients:  # what else is sent to a tool is for nobody here
            yield from self._text("content")

    def _text(self, kind: str) -> Reading:
        """Read a message's text: a line of its own where there is another of its kind before it. `kind`: content,
        reasoning, or "" for a call of a request without tools, which is for nobody. Raises Cut."""
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
        source.at = found.start()  # an end is what the next header is looked for from

    def _emit(self, kind: str, text: str) -> None:
        if kind == "content":
            self._add_content(text)
        elif kind == "reasoning":
            self._think(text)

    def _call_or_text(self, name: str) -> Reading:
        """Read a call; what turns out to be none is content, from the beginning of the body on. Raises Cut."""
        begin = self._source.at
        try:
            yield from self._call(name)
        except (Malformed, Cut) as error:
            if isinstance(error, Cut) and not self._is_whole:
                raise
            self._source.at = begin
            yield from self._text("content")

    def _call(self, name: str) -> Reading:
        """Read a call, of which no body is one without arguments. Raises Malformed, Cut."""
        source = self._source
        has_arguments = (yield from source.peek()) == "{"
        if has_arguments:
            self._sink.begin(name)
            yield from source.json_text(self._sink.add)
        # A stop token that ends the answer is no part of it.
        if not (yield from source.accept(*self._ends, self._start)) and (yield from source.peek()):
            raise Malformed
        if not has_arguments:
            self._sink.begin(name)
            self._sink.add("{}")
        self._sink.end()

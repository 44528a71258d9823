"""Make a ModelVersion: read the tokenizer and template of its folder, and join them with the gateway's parts."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.gguf import is_gguf
from baton.service.settings import SettingsError
from gateway.answer.answer_planner import AnswerPlanner
from gateway.catalog.model_version import ModelVersion
from gateway.config.settings import GatewaySettings
from gateway.fleet.registry import Registry
from gateway.model.model_file import read_model
from gateway.model.model_folder import ModelFolder
from gateway.orchestration.machine import RequestMachine
from gateway.orchestration.pipeline import Pipeline, RecordItl
from gateway.parsers.formats import AnswerFormat, format_named, format_of
from gateway.prefix.prefix_hashes import PrefixHashes
from gateway.prefix.prefix_index import PrefixIndex
from gateway.prefix.public_prefixes import read_public_prefixes
from gateway.queue.admission import AdmissionControl
from gateway.queue.waiting_queue import WaitingQueues
from gateway.request.request_record import RequestRecord
from gateway.text.templates import ChatTemplate, TemplateFailed
from gateway.text.text_work import TextWork
from gateway.text.tokenizer import Tokenizer


class VersionFactory:
    """Make model versions, and let them go again. Belongs to the event loop.

    `running` are the requests of all models by key_id; `itl_recorder_for` is the field of Pipeline."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: Registry,
        index: PrefixIndex,
        admission: AdmissionControl,
        running: dict[str, RequestMachine],
        itl_recorder_for: Callable[[RequestRecord], RecordItl],
    ):
        self._settings, self._registry, self._index = settings, registry, index
        self._admission, self._running, self._itl_recorder_for = admission, running, itl_recorder_for

    def make(self, folder: ModelFolder) -> ModelVersion:
        """Read a model's tokenizer and template in this thread, and accept its workers. Raises SettingsError."""
        return self._join(folder, *self._read_text(folder))

    async def add(self, name: str, path: Path, required_identity: bytes) -> ModelVersion:
        """Read a model's folder, and begin to serve it while others run.

        Raises SettingsError. If it fails or is cancelled, nothing has changed."""
        folder = await asyncio.to_thread(read_model, path, name)
        version = self._join(folder, *await asyncio.to_thread(self._read_text, folder), required_identity)
        try:
            await self.make_public(version)
        except BaseException:
            version.fleet.excludes_its_workers = False
            self.drop(version)
            raise
        self._registry.keep(version.fleet)
        return version

    async def make_public(self, version: ModelVersion) -> None:
        """Let all tenants share the public prefixes of the settings. Raises SettingsError for a prefix that the model
        cannot have."""
        if self._settings.public_prefixes:
            pipeline = version.pipeline
            encode = partial(pipeline.text.encode, context=version.fleet.model.context)
            pipeline.prefix_hashes.make_public(await read_public_prefixes(self._settings.public_prefixes, encode))

    def drop(self, version: ModelVersion) -> None:
        """Refuse the version's workers from now on, and end the threads that process its text."""
        self._registry.drop(version.fleet)
        version.close()

    def _read_text(self, folder: ModelFolder) -> tuple[TextWork, AnswerPlanner]:
        """Read a model's tokenizer and template, which takes a second if they are large. Raises SettingsError."""
        name = str(folder.path if is_gguf(folder.path) else folder.path / "tokenizer.json")
        tokenizer = Tokenizer(folder.tokenizer_json, name, folder.begin, folder.end)
        spells_controls = self._settings.control_tokens_in_prompts
        text = TextWork(tokenizer, _make_template(folder), folder.vocab_size, spells_controls)
        answer_format = _answer_format(self._settings.tool_call_parser, folder)
        return text, AnswerPlanner(tokenizer, text.detokenizer, answer_format)

    def _join(
        self, folder: ModelFolder, text: TextWork, planner: AnswerPlanner, required_identity: bytes = b""
    ) -> ModelVersion:
        """Join all parts of a model, and accept its workers."""
        # Some models name the end token only in `special_tokens`, which are those of the tokenizer.
        ends = folder.eos_ids | text.control_ids(folder.special_tokens.get("eos_token", ""))
        settings, fleet = self._settings, self._registry.add(replace(folder, eos_ids=ends), required_identity)
        return ModelVersion(
            Pipeline(
                fleet=fleet,
                index=self._index,
                prefix_hashes=PrefixHashes(fleet),
                text=text,
                planner=planner,
                admission=self._admission,
                queues=WaitingQueues(settings.max_queued_requests, settings.max_queued_tokens),
                max_queue_wait_s=settings.max_queue_wait_s,
                itl_recorder_for=self._itl_recorder_for,
                slo_classes=self._registry.slo_classes,
                running=self._running,
                loop_watch=self._registry.loop_watch,
            )
        )


def _make_template(folder: ModelFolder) -> ChatTemplate | None:
    if folder.chat_template is None:
        return None
    try:
        return ChatTemplate(folder.chat_template, folder.special_tokens, folder.tool_template)
    except TemplateFailed as error:
        raise SettingsError(f"{folder.path}: chat template: {error}") from None


def _answer_format(name: str, folder: ModelFolder) -> AnswerFormat | None:
    return format_of(folder.tool_template or folder.chat_template or "") if name == "auto" else format_named(name)

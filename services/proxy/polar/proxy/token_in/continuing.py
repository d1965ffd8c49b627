"""One call of a token-in session: the exact tokens of the call that it goes on from, and what is new after them.

Promises: the engine alone renders, and what it renders is compared before its tokens are left out; where the history is
not what was sampled, or cannot be told to be, the prompt is the rendered one and the reason is on the record; every
call, rendered ones too, is measured against the call that it goes on from. Costs a token-in call two renderings, and
two texts where ids and text differ. It knows engines and memory, neither clients nor the log.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Final

from msgspec.structs import replace

from polar.schemas import CompletionCaptured, Engine, TokenIds
from polar.schemas.messages import thinking
from polar.service.tokens import SessionToken

from ..answer import Answer
from ..calls import Call, Json
from ..engine import Endpoint
from ..errors import EngineError, EngineRefused, PromptTooLong
from ..history import Histories
from ..metrics import Metrics
from ..settings import ProxySettings
from ..shapes import VLLM
from .asking import Asking, Rendered
from .compare import common_suffix, drift, same_reply
from .conversation import Conversation, Digest, setting
from .splice import NO_END, REWROTE, New, added, beyond
from .turns import Canonical, Found, Kind, Marks

FORCED: Final = frozenset({"grammar", "forced_tool"})
"""Constraints that the chat route alone makes of a request."""
PREFILL: Final = ("continue_final_message", "add_generation_prompt")
SENTINEL: Final = "Understood, thirteen lighthouses."
"""A reply that no other text is taken for."""
HELLO: Final[Json] = {"role": "user", "content": "Hello."}
ENDINGS: Final = ("Hello.", "Goodbye!")
"""Replies that end in different ids, so that what a template writes after a reply can be read off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a call's prompt comes from, and what it goes on from."""

    conversation: Conversation
    found: Found | None
    kind: Kind | None
    tools: Digest
    setting: Digest
    thinks: bool
    """Its messages hold thinking."""
    asking: Asking | None = None
    ids: TokenIds | None = None
    """The exact prompt; None: the engine renders the messages."""
    rendered: Rendered | None = None
    """The prompt that the exact one stands for."""
    chat: Json = field(default_factory=dict)
    fallback: str | None = None

    @property
    def exact(self) -> bool:
        return self.ids is not None

    async def generate(self, answer: Answer) -> None:
        """Sample after the exact prompt and feed the reply to `answer`. Raises `EngineError`."""
        assert self.asking is not None
        assert self.rendered is not None
        assert self.ids is not None
        await self.asking.generate(self.rendered.request, self.ids, self.chat, answer)

    def marks(self) -> Marks:
        """What later calls are to know of this one."""
        kept = self.exact and self.found is not None and self.found.turn.thinks
        canonical = None if self.rendered is None or not self.exact else Canonical.of(self.rendered.ids)
        return Marks(self.conversation, self.tools, self.setting, canonical, self.thinks or kept)


class Continuing:
    """What calls of all sessions go on from. One per proxy."""

    def __init__(self, settings: ProxySettings, histories: Histories, metrics: Metrics) -> None:
        self._settings = settings
        self._histories = histories
        self._metrics = metrics
        self._able: dict[str, tuple[Engine, bool]] = {}
        """By address: which engine was asked whether it has the routes, and its answer."""
        self._ends: dict[str, tuple[Engine, TokenIds]] = {}
        """By address: what an engine's template writes after a reply."""

    async def context(
        self, token: SessionToken, call: Call, endpoint: Endpoint, chat: Json, *, request_id: str, timeout: float
    ) -> Context:
        """Where the prompt of `call` is to come from. `chat`: what is posted for it where it is rendered.

        Raises:
            EngineRefused: the session asks for token-in, which the engine cannot do; or as the call itself would be.
            PromptTooLong: the exact prompt does not fit the model.
            EngineError: the engine is away or fails.
        """
        context = self._plain(token, call, chat["model"])
        mode = token.capture or self._settings.capture_mode
        if mode == "rendered":
            return context
        able = await self._can(endpoint)
        if not able and token.capture == "token_in":
            raise EngineRefused(
                "This session asks for token-in capture, which its engine cannot do: start vLLM with "
                "--enable-scale-out, or ask for `capture: rendered`.",
                code="token_in_unsupported",
            )
        if not context.conversation.replies():
            return context  # nothing was sampled yet that it could go on from
        keep = token.keep_reasoning or self._settings.keep_reasoning
        reason = self._unfit(call, context, keep) if able else "engine"
        if reason is None:
            probe = self._settings.engine_probe_timeout
            asking = Asking(endpoint, request_id, timeout=timeout, probe_timeout=probe)
            spliced = await self._spliced(context, endpoint, asking, chat, keep)
            if isinstance(spliced, Context):
                return spliced
            reason = spliced
        self._metrics.fallbacks.labels(reason).inc()
        return changed(context, fallback=reason)

    def _plain(self, token: SessionToken, call: Call, model: str) -> Context:
        conversation = Conversation(call.messages)
        found, kind = self._histories.find(token, conversation)
        tools, told = setting(model, call.tools, call.extras)
        return Context(
            conversation=conversation,
            found=found,
            kind=kind,
            tools=tools,
            setting=told,
            thinks=any(thinking(message) for message in call.messages),
        )

    def _unfit(self, call: Call, context: Context, keep: str) -> str | None:
        """Why the call cannot go on from exact tokens, as far as the request tells."""
        if call.media or context.conversation.shows_media():
            return "media"  # ids alone do not hold an image
        if FORCED & set(call.constraints):
            return "constraint"
        if any(name in call.extras for name in PREFILL):
            return "prefill"
        found = context.found
        if found is None:
            return "history_changed" if context.kind == "rewrite" else "not_remembered"
        if found.turn.tools != context.tools:
            return "tools_changed"
        if found.turn.setting != context.setting:
            return "template_changed"
        return None if found.thinking or keep == "always" else "reasoning_dropped"

    async def _spliced(
        self, context: Context, endpoint: Endpoint, asking: Asking, chat: Json, keep: str
    ) -> Context | str:
        """The context with its exact prompt, or why there is none."""
        found = context.found
        assert found is not None
        prompt, reply = found.turn.ids()
        turn_end = TokenIds() if found.turn.ended is not None else await self._turn_end(endpoint)
        whole = asyncio.create_task(asking.render(chat))
        try:
            new: New | str = "reasoning_dropped"
            if found.thinking:
                new = await self._added(found, asking, chat, whole, prompt, reply, turn_end)
            if isinstance(new, str) and keep == "always" and (found.turn.thinks or not found.thinking):
                new = await self._beyond(found, asking, chat, whole, turn_end)
            rendered = await whole
        finally:
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
        if isinstance(new, str):
            return new
        ids: TokenIds = TokenIds.concat([prompt, reply, TokenIds(new.ids)])
        limit = endpoint.max_model_len
        if limit is not None and len(ids) >= limit:
            raise PromptTooLong("the prompt is longer than the model takes", tokens=len(ids), limit=limit)
        request = {**rendered.request, "sampling_params": _sampling(rendered.request, chat, len(ids), limit)}
        return changed(context, asking=asking, ids=ids, rendered=Rendered(rendered.ids, request), chat=chat)

    async def _added(
        self,
        found: Found,
        asking: Asking,
        chat: Json,
        whole: asyncio.Task[Rendered],
        prompt: TokenIds,
        reply: TokenIds,
        turn_end: TokenIds,
    ) -> New | str:
        """What is new where the template shows the history as it was sampled."""
        body = {**chat, "messages": chat["messages"][: found.messages], "add_generation_prompt": False}
        try:
            history = (await asking.render(body, aside="-history")).ids
        except EngineRefused:
            await whole  # a refusal of the whole is the call's own
            return REWROTE
        turn = found.turn
        new = added(history.array, (await whole).ids.array, ended=turn.ended, turn_end=turn_end.array)
        if isinstance(new, str):
            return new
        said = reply if turn.ended is None else reply.slice(0, len(reply) - 1)
        canonical = turn.canonical or Canonical.of(prompt)
        start = canonical.length
        if start <= new.upto and Canonical.of(history.slice(0, start)) == canonical:
            shown = history.slice(start, new.upto)
        else:
            # its ids may still be the same text, cut otherwise: then all of it is compared
            said, shown = TokenIds.concat([prompt, said]), history.slice(0, new.upto)
        if said == shown:
            return new
        texts = await asyncio.gather(asking.text(said), asking.text(shown))
        tools = turn.calls_tools or any(message.get("tool_calls") for message in chat["messages"][: found.messages])
        return new if same_reply(*texts, stop=turn.stop, whole=turn.ended is not None, tools=tools) else REWROTE

    async def _beyond(
        self, found: Found, asking: Asking, chat: Json, whole: asyncio.Task[Rendered], turn_end: TokenIds
    ) -> New | str:
        """What follows the reply, whatever the template leaves of its thinking."""
        messages = list(chat["messages"])
        messages[found.messages - 1] = {"role": "assistant", "content": SENTINEL}
        try:
            marked = (await asking.render({**chat, "messages": messages}, aside="-marked")).ids
        except EngineRefused:
            await whole
            return REWROTE
        new = beyond(marked.array, (await whole).ids.array, ended=found.turn.ended, turn_end=turn_end.array)
        if isinstance(new, str):
            return new
        before = await asking.text(marked.slice(0, new.upto))
        return new if before.rstrip().endswith(SENTINEL) else NO_END

    async def _can(self, endpoint: Endpoint) -> bool:
        """Whether the engine has the routes."""
        engine = await endpoint.identity()
        known = self._able.get(endpoint.url)
        if known is not None and known[0] is engine:
            return known[1]
        able = endpoint.shape is VLLM
        if able:
            asking = self._besides(endpoint)
            try:
                await asking.render({"model": engine.model, "messages": [HELLO]})
            except EngineError as error:
                if error.retryable and (error.status in (503, 504) or endpoint.engine is not engine):
                    raise  # it is away, or its connection broke, which says nothing of its routes
                able = False
        self._able[endpoint.url] = engine, able
        return able

    async def _turn_end(self, endpoint: Endpoint) -> TokenIds:
        """What the engine's template writes after a reply's text; empty where that cannot be read off."""
        engine = await endpoint.identity()
        known = self._ends.get(endpoint.url)
        if known is not None and known[0] is engine:
            return known[1]
        asking = self._besides(endpoint)
        try:
            one, other = [(await asking.render(_ending(engine.model, text))).ids for text in ENDINGS]
        except EngineRefused:
            end = TokenIds()
        else:
            end = one.slice(len(one) - common_suffix(one.array, other.array), len(one))
        self._ends[endpoint.url] = engine, end
        return end

    def _besides(self, endpoint: Endpoint) -> Asking:
        probe = self._settings.engine_probe_timeout
        return Asking(endpoint, "polar-token-in", timeout=probe, probe_timeout=probe)

    def measured(self, context: Context, record: CompletionCaptured) -> CompletionCaptured:
        """`record`, its prompt still whole, with how it stands to the call that it goes on from."""
        found = context.found
        apart = None
        if found is not None:
            apart = drift(TokenIds.concat(found.turn.ids()), record.prompt.ids)
            self._metrics.drifted_ids.inc(apart)
        self._metrics.contexts.labels(context.kind or "unknown", _ids(apart)).inc()
        capture = "token_in" if context.exact else "rendered"
        return replace(record, context_kind=context.kind, drift=apart, capture=capture, fallback=context.fallback)


def _ids(apart: int | None) -> str:
    return "none" if apart is None else "drifted" if apart else "exact"


def _ending(model: str, text: str) -> Json:
    messages = [HELLO, {"role": "assistant", "content": text}]
    return {"model": model, "messages": messages, "add_generation_prompt": False}


def _sampling(request: Json, chat: Json, prompt: int, limit: int | None) -> Json:
    """The engine's own sampling parameters, with the room that the exact prompt leaves."""
    asked = chat.get("max_completion_tokens")
    found = {name: value for name, value in request["sampling_params"].items() if name != "max_tokens"}
    if asked is not None:
        found["max_tokens"] = asked if limit is None else min(asked, limit - prompt)
    return found

"""A served model that says what it is told to, for tests of what stands before models."""

import asyncio

from rayrec.serve.language.config import RemoteModel
from rayrec.serve.language.measures import EngineMeasures
from rayrec.serve.wire.errors import RequestError


class FakeModel:
    """Implements `ServedModel`; answers with its text, a word a chunk."""

    is_here = False

    def __init__(self, name, text="yes it is", error=None, **limits):
        values = {"name": name, "engine": "remote", "url": "http://nowhere/v1"}
        self.settings = RemoteModel.parse(values | limits)
        self.measures = EngineMeasures()
        self.text, self.error = text, error
        self.asked, self.num_open = [], 0
        self.go_on = None
        """An event before the second word; None: at once."""

    async def start(self):
        pass

    async def stop(self):
        pass

    async def why_not(self):
        return None

    def read(self, kind, body):
        return FakeCall(self, kind, body)


class FakeCall:
    def __init__(self, model, kind, body):
        self.model, self.kind, self.body = model, kind, body
        self.count, self.is_stream, self.user = 1, bool(body.get("stream")), body.get("user")

    def check_room(self):
        pass

    def choice(self, text, reason, name):
        said = {"text": text} if self.kind == "text" else {name: {"role": "assistant", "content": text}}
        return {"index": 0, **said, "finish_reason": reason}

    async def whole(self, expires_at):
        self.model.asked.append(self.body)
        if self.model.go_on is not None:
            await self.model.go_on.wait()
        if self.model.error is not None:
            raise RequestError(self.model.error, 502)
        usage = {"prompt_tokens": 3, "completion_tokens": len(self.model.text.split())}
        choices = [self.choice(self.model.text, "stop", "message")]
        return {"model": "inner", "choices": choices, "usage": usage}

    async def stream(self, expires_at):
        self.model.asked.append(self.body)
        return self.chunks()

    async def chunks(self):
        self.model.num_open += 1
        try:
            for number, word in enumerate(self.model.text.split(" ")):
                if number and self.model.go_on is not None:
                    await self.model.go_on.wait()
                yield {"model": "inner", "choices": [self.choice(" " * bool(number) + word, None, "delta")]}
                await asyncio.sleep(0)
            if self.model.error is not None:
                raise RequestError(self.model.error, 502)
            yield {"model": "inner", "choices": [self.choice("", "stop", "delta")]}
        finally:
            self.model.num_open -= 1

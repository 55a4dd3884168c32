"""KServe's own clients asking a service, in a process of their own: their stubs and those of Triton's client
define the same names, which one process can have once.

    python -m tests.serve.rpc.kserve_calls HTTP GRPC
"""

from __future__ import annotations

import asyncio
import json
import sys

import httpx
import kserve
import numpy as np

INPUTS = {"user_id": [["ann"], ["42"]], "history": [["alien", "7"], ["brazil", ""]]}


def request(name, is_binary, model="recommend"):
    values = np.array(INPUTS[name], dtype=object)
    tensor = kserve.InferInput(name, list(values.shape), "BYTES")
    tensor.set_data_from_numpy(values, binary_data=is_binary)
    return kserve.InferRequest(model, [tensor], request_id="r1", parameters={"k": 2})


def found(answer):
    """What a test compares."""
    outputs = {each.name: each.as_numpy() for each in answer.outputs}
    items = [
        [getattr(each, "decode", lambda each=each: each)() for each in row] for row in outputs["item_id"]
    ]
    return {
        "model": answer.model_name,
        "id": answer.id,
        "items": items,
        "scores": outputs["score"].tolist(),
    }


async def by_grpc(address):
    async with kserve.InferenceGRPCClient(address, retries=0) as client:
        health = [
            await client.is_server_live(),
            await client.is_server_ready(),
            await client.is_model_ready("recommend"),
            await client.is_model_ready("other"),
        ]
        answers = {
            f"{name} {is_binary}": found(await client.infer(request(name, is_binary)))
            for name in INPUTS
            for is_binary in (False, True)
        }
        try:
            await client.infer(request("user_id", True, model="other"))
        except Exception as error:
            return {"health": health, "answers": answers, "refused": error.code().name}
        raise AssertionError("there is no such model")


async def by_http(address):
    config = kserve.RESTConfig(protocol="v2", transport=httpx.AsyncHTTPTransport())
    client, url = kserve.InferenceRESTClient(config), f"http://{address}"
    health = [
        await client.is_server_live(url),
        await client.is_server_ready(url),
        await client.is_model_ready(url, "recommend"),
    ]
    answers = {
        f"{name} {is_binary}": found(
            await client.infer(url, request(name, is_binary), model_name="recommend")
        )
        for name in INPUTS
        for is_binary in (False, True)
    }
    try:
        await client.infer(url, request("user_id", False, model="other"), model_name="other")
    except httpx.HTTPStatusError as error:
        await client.close()
        return {"health": health, "answers": answers, "refused": error.response.status_code}
    raise AssertionError("there is no such model")


if __name__ == "__main__":
    http, grpc = sys.argv[1:]
    print(json.dumps({"http": asyncio.run(by_http(http)), "grpc": asyncio.run(by_grpc(grpc))}))

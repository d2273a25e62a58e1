"""The service under load: many streams at once, answered together or one by one.

usage: python benchmarks/serve.py BUNDLE [--seconds 60]

Starts `fedthe serve` on loopback, twice for each way, taking turns, and asks for single samples over 50 streams, one
request in flight for each. The client is in this process, on the same cores. Writes serve.json beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from fedthe import store
from fedthe.deploy.bundle import read_bundle

STREAMS, WARM = 50, 3.0


class Connection:
    """HTTP/1.1 without a library, which would cost the client more than the server."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def post(self, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        await self._writer.drain()
        told = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(told.partition("content-length:")[2].partition("\r\n")[0])
        return int(told.split()[1]), await self._reader.readexactly(length)


async def load(port: int, image: bytes, seconds: float) -> dict[str, float]:
    connections = [Connection(port) for _ in range(STREAMS)]
    for each in connections:
        await each.open()
    ids = [json.loads((await each.post("/streams", b"{}", "application/json"))[1])["id"] for each in connections]
    spent: list[float] = []
    errors = 0
    began = time.perf_counter()

    async def ask(connection: Connection, id: str) -> None:
        nonlocal errors
        while (now := time.perf_counter()) < began + WARM + seconds:
            code, _ = await connection.post(f"/streams/{id}/predict", image, "image/png")
            errors += code != 200
            if now > began + WARM:
                spent.append(time.perf_counter() - now)

    await asyncio.gather(*(ask(each, id) for each, id in zip(connections, ids, strict=True)))
    cuts = statistics.quantiles(spent, n=100)
    return {
        "answers per second": len(spent) / seconds,
        "p50 ms": 1000 * cuts[49],
        "p99 ms": 1000 * cuts[98],
        "errors": errors,
    }


def serve_and_load(bundle: Path, together: int, seconds: float) -> dict[str, float]:
    pixels = np.random.default_rng(0).integers(0, 256, read_bundle(bundle).input.shape, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, "PNG")
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedthe", "serve", str(bundle), "--port", "0", "--rate", "0"]
        command += ["--together", str(together), "--database", f"{folder}/streams.db"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                port = int(server.stderr.readline().rstrip("/\n").rpartition(":")[2])
                return asyncio.run(load(port, file.getvalue(), seconds))
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    ways = {"together": 64, "one by one": 1}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(2):
        for name, together in ways.items():
            runs[name].append(serve_and_load(given.bundle, together, given.seconds / 2))
            print(name, {what: round(value, 2) for what, value in runs[name][-1].items()}, flush=True)
    means = {
        name: {what: statistics.mean(run[what] for run in some) for what in some[0]} for name, some in runs.items()
    }
    ratio = means["together"]["answers per second"] / means["one by one"]["answers per second"]
    method = read_bundle(given.bundle).name
    found = {"method": method, "streams": STREAMS, "seconds": given.seconds, **means, "throughput ratio": ratio}
    store.write_json(Path(__file__).with_suffix(".json"), found)
    print(f"together answers {ratio:.2f} times as many")


if __name__ == "__main__":
    main()

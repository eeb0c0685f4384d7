"""A camera that streams JPEGs over HTTP (multipart/x-mixed-replace): `python camera.py PORT PICTURES_PER_S`.

It shows the pictures that ship with Terrace, one after the other. It says "ready" on standard output once it listens.
"""

import asyncio
import io
import itertools
import sys

from PIL import Image

from models.data import read_sample


def pictures() -> list[bytes]:
    found = []
    for pixels in read_sample().images:
        file = io.BytesIO()
        Image.fromarray(pixels).resize((128, 128), Image.Resampling.NEAREST).save(file, "JPEG", quality=95)
        found.append(file.getvalue())
    return found


async def main(port: int, pictures_per_s: float) -> None:
    shown = itertools.cycle(pictures())

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=next\r\n\r\n")
        try:
            while True:
                picture = next(shown)
                head = f"--next\r\nContent-Type: image/jpeg\r\nContent-Length: {len(picture)}\r\n\r\n"
                writer.write(head.encode() + picture + b"\r\n")
                await writer.drain()
                await asyncio.sleep(1 / pictures_per_s)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(stream, "0.0.0.0", port)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2])))

# mypy: ignore-errors
# Runs where libtorrent is.
"""libtorrent: one machine of `terrace experiment data-copies`. Each knows all addresses from the start, so there is no
tracker. What it sends and what it receives are paced by libtorrent's own limits."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import libtorrent as lt

_PIECE_BYTES = 256 * 1024
_LOOK_S = 0.005
_NAME = "segment"


def tell(**figures) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def session(asked: argparse.Namespace):
    found = lt.session(
        {
            "listen_interfaces": f"127.0.0.1:{asked.port}",
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "upload_rate_limit": int(asked.rate),
            "download_rate_limit": int(asked.rate),
            "allow_multiple_connections_per_ip": True,
            "enable_outgoing_utp": False,
            "enable_incoming_utp": False,
            "alert_mask": 0,
        }
    )
    # All addresses here are local ones, which have no limits unless they are said to be like all others.
    everyone = lt.ip_filter()
    everyone.add_rule("0.0.0.0", "255.255.255.255", 1 << lt.session.global_peer_class_id)
    found.set_peer_class_filter(everyone)
    return found


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--role", choices=["source", "machine"])
    flags.add_argument("--folder", type=Path)
    flags.add_argument("--go", type=Path)
    flags.add_argument("--torrent", type=Path)
    flags.add_argument("--port", type=int)
    flags.add_argument("--ports")
    flags.add_argument("--size", type=int)
    flags.add_argument("--rate", type=float)
    asked = flags.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    own = session(asked)
    if asked.role == "source":
        (asked.folder / _NAME).write_bytes(random.Random(0).randbytes(asked.size))
        files = lt.file_storage()
        lt.add_files(files, str(asked.folder / _NAME))
        torrent = lt.create_torrent(files, piece_size=_PIECE_BYTES)
        lt.set_piece_hashes(torrent, str(asked.folder))
        asked.torrent.write_bytes(lt.bencode(torrent.generate()))
    tell(ready="")
    while not asked.go.exists():
        time.sleep(_LOOK_S)
    handle = own.add_torrent({"ti": lt.torrent_info(str(asked.torrent)), "save_path": str(asked.folder)})
    for port in map(int, asked.ports.split(",")):
        if port != asked.port:
            handle.connect_peer(("127.0.0.1", port))
    told = asked.role == "source"
    while True:
        if not told and handle.status().is_seeding:
            tell(done=time.monotonic())
            told = True
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()

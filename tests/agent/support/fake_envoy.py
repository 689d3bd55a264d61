#!/usr/bin/env python3
"""Speaks Envoy's conventions of start, hot restart and draining, as the files of a directory say.

Usage: fake_envoy.py DIR [ENVOY OPTIONS]

In DIR: journal (what happened, one line each), refuse (the configuration is wrong), fail (a serving process exits with this status
before it is live), word (what it prints last), slow (seconds until it is live), connections (how many there are; /healthcheck/fail does not end them).
"""

import http.server
import json
import os
import pathlib
import signal
import sys
import threading
import time

here = pathlib.Path(sys.argv[1])
options = dict(zip(sys.argv[2:], sys.argv[3:]))
epoch = int(options.get("--restart-epoch", 0))


def note(what):
    with open(here / "journal", "a") as journal:
        journal.write(f"{what}\n")


def leave(what, status):
    note(f"{what} {epoch}")
    if (here / "word").exists():
        print((here / "word").read_text(), file=sys.stderr, flush=True)
    os._exit(status)


def number(name):
    try:
        return float((here / name).read_text())
    except (OSError, ValueError):
        return 0


if options.get("--mode") == "validate":
    refuse = here / "refuse"
    note("validate")
    if refuse.exists():
        print("[2026][1][info][main] checking\nno such field: 'wrong'", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)

note(f"start {epoch} {os.getpid()}")
(here / f"live-{epoch + 1}").unlink(missing_ok=True)
for name in (here / "refuse", here / "fail"):
    if name.exists():
        leave("failed", int(number("fail")) or 1)
signal.signal(signal.SIGTERM, lambda *_: leave("term", 0))
signal.signal(signal.SIGUSR1, lambda *_: note(f"usr1 {epoch}"))


class Admin(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        if self.path == "/ready":
            self.answer("LIVE\n" if live.is_set() else "INITIALIZING\n")
        elif self.path.startswith("/config_dump"):
            self.answer(json.dumps({"configs": [{"bootstrap": {"node": {"id": "fake"}}}]}))
        elif "hot_restart_epoch" in self.path:
            self.answer(f"server.hot_restart_epoch: {epoch}\n")
        else:
            self.answer(f"listener.in.downstream_cx_active: {int(number('connections'))}\n")

    def do_POST(self):
        note(f"POST {self.path}")
        self.answer("OK\n")


live = threading.Event()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin)
threading.Thread(target=server.serve_forever, daemon=True).start()
if "--admin-address-path" in options:
    pathlib.Path(options["--admin-address-path"]).write_text("%s:%d" % server.server_address)
time.sleep(number("slow"))
live.set()
(here / f"live-{epoch}").touch()
note(f"live {epoch}")
print(f"epoch {epoch} serves", file=sys.stderr, flush=True)
while True:
    time.sleep(0.02)
    if "--restart-epoch" in options and (here / f"live-{epoch + 1}").exists():
        time.sleep(float(options["--parent-shutdown-time-s"]))
        leave("drained", 0)

"""Sends requests to each URL, one after the other, and counts the responses.

Usage: load.py once URL          sends one request, and prints the body of its response, or its status
       load.py RESULT URL...     sends requests until SIGTERM, then writes what came back to the file RESULT (JSON)
"""

import collections
import http.client
import json
import re
import signal
import sys
import threading
import urllib.error
import urllib.request

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PAUSE = 0.02
SHOWN = 5


def ask(url):
    """The status and the body of one response."""
    try:
        with DIRECT.open(url, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}"


class Client(threading.Thread):
    def __init__(self, url, stop):
        super().__init__()
        self.url, self.stop = url, stop
        self.requests, self.failures, self.failed = 0, [], 0
        self.versions = collections.Counter()

    def run(self):
        while not self.stop.wait(PAUSE):
            status, body = ask(self.url)
            self.requests += 1
            version = re.match(r"Hello version: (\w+), asked by spiffe://", body)
            if status == 200 and version:
                self.versions[version.group(1)] += 1
            else:
                self.failed += 1
                self.failures = [*self.failures, f"status {status}: {body.strip()}"][:SHOWN]

    def result(self):
        return {
            "requests": self.requests,
            "failed": self.failed,
            "failures": self.failures,
            "versions": self.versions,
        }


def main():
    if sys.argv[1] == "once":
        status, body = ask(sys.argv[2])
        print(body.strip() if status == 200 else f"status {status}")
        return
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    clients = [Client(url, stop) for url in sys.argv[2:]]
    for client in clients:
        client.start()
    print("sending", flush=True)
    # A wait without a limit would keep the signal from its handler.
    while not stop.wait(0.5):
        pass
    for client in clients:
        client.join()
    with open(sys.argv[1], "w") as file:
        json.dump([client.result() for client in clients], file)


main()

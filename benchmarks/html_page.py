"""How large the HTML page of a million allocator events is, and how fluidly it moves.

    python benchmarks/html_page.py [--events 1000000]

Frames are counted in headless Chromium, where there is one: 120 moves of the view through the
zoomed timeline, each drawn before the next; the table has the time that drawing took in a frame.
Headless Chromium draws on the processor: a screen with a GPU is faster.
"""

from __future__ import annotations

import argparse
import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

MEASURE = """
ready.then(async () => {
  const chart = [...drawn.values()][0], spent = [];
  const show = (from, to) => { chart.from = from; chart.to = to; const began = performance.now();
    redrawNow(); spent.push(performance.now() - began); };
  const [low, high] = chart.full, wide = high - low;
  for (const part of [1, 0.3, 0.05]) for (let i = 0; i < 40; i++) {
    const from = low + (wide * (1 - part) * i) / 39;
    show(from, from + wide * part);
    await new Promise((done) => requestAnimationFrame(done));
  }
  spent.sort((a, b) => a - b);
  const at = (share) => spent[Math.floor(share * (spent.length - 1))].toFixed(1);
  const found = {median: at(0.5), p95: at(0.95), worst: at(1)};
  navigator.sendBeacon("http://127.0.0.1:PORT/", JSON.stringify(found));
}).catch((error) => navigator.sendBeacon("http://127.0.0.1:PORT/", String(error)));
"""


def measured(browser: str, page: Path, folder: Path) -> str:
    """Open the page in a browser and wait for what it reports."""
    answer: queue.Queue[str] = queue.Queue()

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The page forbids scripts that are not its own; the copy that is measured does not.
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text("utf-8"), count=1)
    script = MEASURE.replace("PORT", str(server.server_port))
    page.write_text(text.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    process = subprocess.Popen(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900",
         "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", page.as_uri()],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return answer.get(timeout=120)
    finally:
        process.terminate()
        process.wait()
        server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    events = parser.parse_args().events
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot, page = folder / "made.pickle", folder / "page.html"
        maker = [sys.executable, HERE / "make_snapshot.py", snapshot, "--events", str(events)]
        subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
        began = time.perf_counter()
        command = [sys.executable, "-m", "gpuprobe", "report", snapshot, "--html", page]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        print(f"{events:,} events")
        print(f"  written in    {time.perf_counter() - began:8.1f} s")
        print(f"  the page has  {page.stat().st_size / 2**20:8.2f} MiB")
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("  no Chromium: frames not measured")
            return
        times = json.loads(measured(browser, page, folder))
        said = ", ".join(f"{name} {value} ms" for name, value in times.items())
        print(f"  drawing one frame while moving: {said}")


if __name__ == "__main__":
    main()

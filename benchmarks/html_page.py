"""How large the HTML page of a million allocator events is, and how fluidly it moves.

    python benchmarks/html_page.py [--events 1000000]

Frames are measured in headless Chromium, if it is installed: 120 moves of the view through the
zoomed timeline, each drawn before the next, by category and by block; and 100 clicks on blocks. The
table has the time that drawing a frame took, and finding a block with its stack.
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
  const chart = [...drawn.values()][0], [low, high] = chart.full, wide = high - low;
  const summary = (spent) => {
    spent.sort((a, b) => a - b);
    const at = (share) => spent[Math.floor(share * (spent.length - 1))].toFixed(1);
    return {median: at(0.5), p95: at(0.95), worst: at(1)};
  };
  const frames = async () => {
    const spent = [];
    for (const part of [1, 0.3, 0.05]) for (let i = 0; i < 40; i++) {
      chart.from = low + (wide * (1 - part) * i) / 39;
      chart.to = chart.from + wide * part;
      const began = performance.now();
      redrawNow();
      spent.push(performance.now() - began);
      await new Promise((done) => requestAnimationFrame(done));
    }
    return summary(spent);
  };
  const opened = performance.now().toFixed(0), bands = await frames();
  const began = performance.now();
  await chart.toggleBlocks();
  const unpacked = (performance.now() - began).toFixed(1), blocks = await frames(), clicks = [];
  chart.reset();
  redrawNow();
  const box = chart.canvas.getBoundingClientRect();
  let hits = 0;
  for (let i = 0; i < 100; i++) {
    const clientX = box.left + chart.left + (chart.width() * i) / 100, began = performance.now();
    chart.clicked({clientX, clientY: box.top + chart.view.bottom - 60});
    clicks.push(performance.now() - began);
    if (chart.blocks.chosen >= 0) hits++;
  }
  const found = {opened, unpacked, drawn: chart.blocks.length, total: chart.blocks.total, hits,
    bands, blocks, clicks: summary(clicks)};
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
        found = json.loads(measured(browser, page, folder))
        print(f"  ready after   {found['opened']:>8} ms in the browser")
        print(f"  blocks        {found['drawn']:,} of {found['total']:,} one by one,"
              f" unpacked in {found['unpacked']} ms")  # fmt: skip
        for name, what in (("bands", "a frame, by category"), ("blocks", "a frame, by block"),
                           ("clicks", "a click on a block")):  # fmt: skip
            shown = ", ".join(f"{key} {value} ms" for key, value in found[name].items())
            print(f"  {what:<21} {shown}")
        print(f"  {found['hits']} of 100 clicks found a block")


if __name__ == "__main__":
    main()

# launch: python
import subprocess
import sys

PART = """
import sys, torch
device = "cuda" if torch.cuda.is_available() else "cpu"
start = torch.full((4,), float(sys.argv[1]), device=device)
count = 0
while start.sum().item() > 1:
    start = start / 2
    count += 1
print("rank", sys.argv[1], ":", count, start.sum().item())
"""
for value in ("3", "40"):
    done = subprocess.run([sys.executable, "-c", PART, value], capture_output=True, text=True)
    print(done.stdout.strip() or done.stderr[-200:], done.returncode)

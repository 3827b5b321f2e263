#!/usr/bin/env bash
# How long a new user waits, in seconds, as README.md states it:
#   install  a clone and its environment
#   first    the first report (leakbound audit --quick)
#   own      a report on 60 images of one's own, by the plan of docs/quickstart.md
#   noise    the first calibrated noise
#
#   bash benchmarks/new_user.sh                    # all four, once, in a temporary folder
#   RUNS=5 bash benchmarks/new_user.sh             # five times, a fresh clone and environment each
#   BIN=.venv/bin bash benchmarks/new_user.sh noise   # some, with an environment that is there
#
# Packages come from where pip is set up to take them: a full cache shortens `install`.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=${BIN:+$(cd "$BIN" && pwd)}
steps=${*:-install first own noise}
runs=${RUNS:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The name of a step, and the seconds that its command takes; what it prints goes into a file.
timed() {
  local name=$1 began
  shift
  began=$(date +%s.%N)
  "$@" >"$work/log" 2>&1 || { trap - EXIT; echo "$name failed: see $work/log"; exit 1; }
  python3 -c 'import sys; print(f"{sys.argv[1]:8s} {float(sys.argv[3]) - float(sys.argv[2]):6.1f} s")' \
    "$name" "$began" "$(date +%s.%N)"
}

install() {
  git clone --quiet "$root" "$here/clone" && make -C "$here/clone" setup
}

first() {
  cd "$here" && "$bin/leakbound" audit --quick --out quick
}

# 60 photographs in two class folders stand for a user's own images; they are there before the clock.
images() {
  mkdir -p "$here/data/a" "$here/data/b"
  "$bin/python" - "$here" "$root/docs/quickstart.md" <<'PYTHON'
import pathlib, re, sys
import leakbound as lb
from PIL import Image

here, page = map(pathlib.Path, sys.argv[1:])
for number, image in enumerate(lb.data.load("photos", size=32, limit=60).inputs):
    pixels = (image.permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(pixels.squeeze()).save(here / "data" / "ab"[number % 2] / f"{number}.png")
assert number == 59
(here / "plan.toml").write_text(re.search(r"```toml\n(.*?)```", page.read_text(), re.S)[1])
PYTHON
}

own() {
  cd "$here" && "$bin/leakbound" audit plan.toml --out own
}

noise() {
  "$bin/leakbound" calibrate --target "psnr>=30 with probability<=0.01" --data mnist5k \
    --prior mixture --sampling-rate 0.01 --steps 1000
}

echo "$(getconf _NPROCESSORS_ONLN) cores, $(uname -m), $(git -C "$root" rev-parse --short HEAD)"
for run in $(seq "$runs"); do
  here=$work/$run
  cd "$work" # steps go into the folder of their run, which is removed
  mkdir "$here"
  for step in $steps; do
    if [ "$step" = install ]; then bin=$here/clone/.venv/bin; fi
    if [ "$step" = own ]; then images; fi
    timed "$step" "$step"
  done
  rm -rf "$here"
done

"""`./run bench` lists the benchmarks, `./run bench NAME [options]` runs one: a module with `main(arguments)`."""

import importlib
import pkgutil
import sys

import benchmarks

NOT_BENCHMARKS = {"__main__", "timing"}
names = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in NOT_BENCHMARKS)
if len(sys.argv) < 2 or sys.argv[1] not in names:
    print(f"usage: ./run bench NAME [options], where NAME is one of: {', '.join(names)}")
    sys.exit(0 if len(sys.argv) < 2 else 2)
importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])

# Fills its folder with bytes, files and folders.
# prints: held
import os

broke = []
written = 0
try:
    for number in range(1000):
        with open(f"f{number}", "wb") as file:
            written += file.write(b"x" * 2**20)
except OSError:
    pass
if written > 80 * 2**20:
    broke.append(f"wrote {written} bytes")
for name in os.listdir():
    if name.startswith("f"):
        os.remove(name)
made = 0
try:
    while made < 100_000:
        os.mkdir("d")
        os.chdir("d")
        made += 1
except OSError:
    pass
if made > 20_000:
    broke.append(f"made {made} folders")
print(*([f"broke {name}" for name in broke] or ["held"]))

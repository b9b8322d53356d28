# Writes a file beyond its limit.
# walls: none
# prints: held
try:
    with open("large", "wb") as file:
        for _ in range(64):
            file.write(b"x" * 2**20)
    print("broke")
except OSError:
    print("held")

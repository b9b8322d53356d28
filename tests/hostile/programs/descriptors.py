# Looks for open descriptors beside its input and outputs.
# walls: none
# prints: [0, 1, 2]
import os

found = []
for descriptor in range(1024):
    try:
        os.fstat(descriptor)
        found.append(descriptor)
    except OSError:
        pass
print(found)

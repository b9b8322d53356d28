# Looks for rights of the user of the trainer, by user id and groups.
# prints: held
import os

ids = {*os.getresuid(), *os.getresgid(), *os.getgroups()}
print("held" if len(ids - {65534}) <= 1 else f"broke {ids}")

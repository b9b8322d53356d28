# Takes memory beyond its limit.
# walls: none
# prints: held
try:
    bytearray(2**31)
    print("broke")
except MemoryError:
    print("held")

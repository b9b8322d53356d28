# Closes its outputs and hangs.
# walls: none
# ended: timeout
import os
import time

os.closerange(0, 64)
time.sleep(120)

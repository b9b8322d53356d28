# Ends by a signal without a name.
# walls: none
# ended: killed
# status: -40
import os

os.kill(os.getpid(), 40)

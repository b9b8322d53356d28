# Prints its environment.
# walls: none
# prints: ['HOME', 'LANG', 'PATH']
import os

print(sorted(os.environ))

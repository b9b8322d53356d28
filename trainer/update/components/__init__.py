"""Components of the loss of an optimizer step, one file each; `table.py` names them."""

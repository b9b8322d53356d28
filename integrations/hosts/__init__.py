"""Programs of hosts that play environments of other packages in interpreters of their own."""

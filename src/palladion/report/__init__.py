"""What a check finds in a program's kernel calls: recorded, analysed, and shown as tables or JSON."""

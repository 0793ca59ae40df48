"""What takes the place of Ray, Arrow and torch in the light slice; everything here is the standard library's."""

"""Times of whole steps beside other packages'."""

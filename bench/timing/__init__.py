"""What steps take: time beside other packages'."""

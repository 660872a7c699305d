# The usual names for what ./run does.
.PHONY: bench test

# Microbenchmarks and whole steps on the CPU; make bench OUT=DIR puts the rows there.
bench:
	./run bench $(if $(OUT),--out "$(OUT)")

test:
	./run test

// Several flows of control in one thread of the operating system, each with its own stack.
#pragma once

#include <setjmp.h>

#include <cstddef>

namespace host_cuda {

// Where a flow of control goes on.
struct Context {
    jmp_buf registers;
};

class Stack {
public:
    // Mapped when first entered, with a page below it that faults.
    Stack() = default;
    Stack(const Stack&) = delete;
    Stack& operator=(const Stack&) = delete;
    ~Stack();

    // Leave for `function` on this stack, `offset` bytes below its top, until somebody changes to `from`. What was on
    // the stack is gone, without destructors. `function` must not return.
    void enter(Context& from, void (*function)(), std::size_t offset);

private:
    unsigned char* mapping = nullptr;
};

// Leave for `to`, until somebody changes to `from`. Unlike swapcontext this makes no system call.
void change(Context& from, Context& to);

}  // namespace host_cuda

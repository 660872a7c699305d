#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks

#include "fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <new>

namespace host_cuda {
namespace {

constexpr std::size_t SIZE = 128 * 1024;

std::size_t guard() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// Apart and not inlined, as change is: no variable of theirs lives across setjmp's second return.
__attribute__((noinline)) void start(Context& from, const ucontext_t& to) {
    if (_setjmp(from.registers) == 0) setcontext(&to);
}

}  // namespace

__attribute__((noinline)) void change(Context& from, Context& to) {
    if (_setjmp(from.registers) == 0) _longjmp(to.registers, 1);
}

void Stack::enter(Context& from, void (*function)(), std::size_t offset) {
    if (mapping == nullptr) {
        constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE;
        void* memory = mmap(nullptr, guard() + SIZE, PROT_READ | PROT_WRITE, kind, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mapping = static_cast<unsigned char*>(memory);
        if (mprotect(mapping, guard(), PROT_NONE) != 0) throw std::bad_alloc();
    }
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = mapping + guard();
    context.uc_stack.ss_size = SIZE - offset;
    context.uc_link = nullptr;
    makecontext(&context, function, 0);
    start(from, context);
}

Stack::~Stack() {
    if (mapping != nullptr) munmap(mapping, guard() + SIZE);
}

}  // namespace host_cuda

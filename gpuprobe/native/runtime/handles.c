// Objects of libraries that callers only pass around: handles, descriptors, plans.
#include "native.h"
#define HANDLE_MAGIC 0x68616e64u

handle *new_handle(void) { handle *h = calloc(1, sizeof *h); if (h) h->magic = HANDLE_MAGIC; return h; }
bool is_handle(const void *pointer) { return (uintptr_t)pointer > 4096 && !((uintptr_t)pointer & 7) && ((const handle *)pointer)->magic == HANDLE_MAGIC; }
void drop_handle(void *pointer) { if (is_handle(pointer)) { ((handle *)pointer)->magic = 0; free(pointer); } }

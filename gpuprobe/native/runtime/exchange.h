// Collectives between processes: what nccl.c and exchange.c share.
#ifndef GPUPROBE_EXCHANGE_H
#define GPUPROBE_EXCHANGE_H
#include "native.h"

enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SPLIT, SEND, RECV };
typedef struct { int kind, type, op, root, peer; uint64_t count; } exchange_call;   // count: elements, of one rank's part
typedef struct exchange exchange;

bool exchange_identity(void *id);            // a new group's ncclUniqueId
uint32_t exchange_number(const void *id);    // the same in all of its ranks, and not 0
bool exchange_is_identity(const void *id);
void exchange_forget(const void *id);        // of a group that nobody joins
exchange *exchange_join(const void *id, int size, int rank);
int exchange_rank(const exchange *x);
int exchange_issue(exchange *x, exchange_call call, const void *from, size_t bytes, void *to, void *stream);
bool exchange_split(exchange *x, int color, int key, void *id, int *size, int *rank);
int exchange_settle(exchange *x);
int exchange_leave(exchange *x);
void exchange_free(exchange *x);
int exchange_kept_by_graphs(void);           // reports it: COLLECTIVE_FAILED

// --- nccl.c
size_t collective_width(int type);
void collective_add(void *total, const void *more, size_t n, int type, int op);         // one rank's part to the others'
void collective_finish(void *total, size_t n, int type, int op, int ranks);            // after all ranks' parts
#endif

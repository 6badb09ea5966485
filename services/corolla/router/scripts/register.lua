-- Registers a server with its span, if the placement still has the version on which the span was chosen.
-- ARGV: expected version, server id, address, description, lease, number of blocks, the caller's workload or ''.
-- Returns 1; 0 if the version is another; 3 if another workload registered this server, or the one at its address.
if version() ~= ARGV[1] then return 0 end
local server_id, address = ARGV[2], ARGV[3]
local older = redis.call('HGET', ADDRESSES, address)
if is_anothers(server_id, ARGV[7]) or (older and is_anothers(older, ARGV[7])) then return 3 end
for _, replaced in ipairs({older or server_id, server_id}) do
  local entry = redis.call('HGET', SERVERS, replaced)
  if entry then remove(replaced, entry) end
end
redis.call('HSET', SERVERS, server_id, address .. '\n' .. ARGV[4])
redis.call('HSET', ADDRESSES, address, server_id)
if ARGV[7] ~= '' then
  redis.call('HSET', WORKLOADS, server_id, ARGV[7])
  redis.call('PEXPIRE', WORKLOADS, FORGOTTEN_AFTER_MS)
end
hear(server_id, ARGV[5])
redis.call('HSET', PLACEMENT, 'blocks', ARGV[6])
changed(server_id)
return 1

-- Registers a server with its span, if spans and speeds are still those on which the span was chosen.
-- ARGV: server id, address, description, lease, number of blocks, the caller's workload or '', the version on which the
-- span was chosen, and the id of its change.
-- Returns the new version and the id of its change; 0 if spans or speeds are others; 3 if another workload registered
-- this server, or the one at its address.
if not only_changes_since(ARGV[8], ARGV[7], {[STATE] = true, [READY] = true}) then return 0 end
local server_id, address = ARGV[1], ARGV[2]
local older = redis.call('HGET', ADDRESSES, address)
if is_anothers(server_id, ARGV[6]) or (older and is_anothers(older, ARGV[6])) then return 3 end
for _, replaced in ipairs({older or server_id, server_id}) do
  local entry = redis.call('HGET', SERVERS, replaced)
  if entry then
    remove(replaced, entry)
    changed(replaced)
  end
end
redis.call('HSET', SERVERS, server_id, address .. '\n' .. ARGV[3])
redis.call('HSET', ADDRESSES, address, server_id)
if ARGV[6] ~= '' then
  redis.call('HSET', WORKLOADS, server_id, ARGV[6])
  redis.call('PEXPIRE', WORKLOADS, FORGOTTEN_AFTER_MS)
end
hear(server_id, ARGV[4])
redis.call('HSET', PLACEMENT, 'blocks', ARGV[5])
changed(server_id)
return {version(), last_change()}
